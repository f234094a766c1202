"""Workers of several ranks through HTTP: the tokens of one rank, whoever reads whose KV, and after a rank's death."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from benchmarks.model_folder import with_tokenizer
from engine import LLM, SamplingParams
from tests.cluster.harness import Cluster, running_cluster
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE
from tests.processes import command_line, descendants, until_stopped

ENGINE = ("--model=dry-run", "--num-gpu-blocks=256", "--quant-mode=none")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.1, seed=5, presence_penalty=0.4, ignore_eos=True)
PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog. " * 5, "x" * 400]


@pytest.fixture(scope="module")
def reference() -> LLM:
    return LLM("dry-run", num_gpu_blocks=256, num_threads=1)


def complete(cluster: Cluster, prompt: str, params: SamplingParams) -> str:
    answer = cluster.client().completions.create(
        model="dry-run",
        prompt=prompt,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=params.seed,
        presence_penalty=params.presence_penalty,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].text


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        ("--tp=1", "--tp=2", "nixl"),
        ("--tp=4", "--tp=2", "tcp"),
        ("--pp=2 --tp=2", "--pp=2 --num-speculative-tokens=3", "shm"),
        pytest.param("--pp=2 --tp=2", "--pp=2 --tp=2", "shm", marks=pytest.mark.soak),
        pytest.param("--tp=2", "--pp=2 --tp=2", "tcp", marks=pytest.mark.soak),
        pytest.param("--pp=2", "--tp=2", "shm", marks=pytest.mark.soak),
        pytest.param("--pp=2", "--pp=1", "tcp", marks=pytest.mark.soak),
        pytest.param("--pp=1", "--pp=2", "nixl", marks=pytest.mark.soak),
        pytest.param("--pp=2", "--pp=2", "tcp", marks=pytest.mark.soak),
        pytest.param("--tp=2", "--tp=2", "tcp", marks=pytest.mark.soak),
        pytest.param("--tp=2", "--tp=1", "shm", marks=pytest.mark.soak),
        pytest.param("--tp=2", "--tp=1", "tcp", marks=pytest.mark.soak),
        pytest.param("--tp=1", "--tp=2", "shm", marks=pytest.mark.soak),
        pytest.param("--tp=1", "--tp=2", "tcp", marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_tokens_equal_those_of_one_rank(reference: LLM, prefill: str, decode: str, transport: str) -> None:
    """4 ranks share 2 KV heads: two hold each."""
    with running_cluster(
        engine_args=ENGINE,
        worker_args=(f"--kv-transport={transport}",),
        role_args={"prefill": prefill.split(), "decode": decode.split()},
    ) as cluster:
        for params in (GREEDY, SAMPLED):
            expected = [completion.text for completion in reference.generate(PROMPTS, params)]
            assert [complete(cluster, prompt, params) for prompt in PROMPTS] == expected
            assert [complete(cluster, prompt, params) for prompt in PROMPTS] == expected  # from the caches
        workers = {worker["id"]: worker for worker in cluster.wait_quiet()}
        answer = cluster.client().completions.create(
            model="dry-run", prompt="a new prompt " * 20, max_tokens=4, extra_body={"ignore_eos": True}
        )
        assert f"'{transport}'" in str(cluster.get(f"/explain/{answer.id}"))
        assert set(workers) == {"prefill-0", "decode-0"}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "prefill", "decode", "is_pulled"),
    [
        ("gemma3", "--pp=2", "--pp=2 --tp=2", True),
        ("mistral-window", "--pp=2", "--tp=2", True),
        ("gemma3", "--pp=2", "--pp=1", False),  # groups of layers, and other stages: computed again
    ],
)
def test_kv_of_windows_between_stages(name: str, prefill: str, decode: str, is_pulled: bool, tmp_path: Path) -> None:
    (flag,), _ = with_tokenizer([f"--model={TINY_MODELS[name].save(tmp_path / name)}"], tmp_path / "served")
    model = flag.partition("=")[2]
    settings = {"load_format": "dummy", "num_gpu_blocks": 400, "quant_mode": "none", "dtype": "float32"}
    llm = LLM(model, block_size=4, num_threads=1, **settings)
    prompts = [[(7 * i + 11 * j) % (VOCAB_SIZE - 8) + 8 for j in range(30 + 19 * i)] for i in range(3)]
    expected = [completion.text for completion in llm.generate(prompts, GREEDY)]
    flags = [f"--{setting.replace('_', '-')}={value}" for setting, value in settings.items()]
    with running_cluster(
        engine_args=(f"--model={model}", "--block-size=4", *flags),
        role_args={"prefill": prefill.split(), "decode": decode.split()},
    ) as cluster:
        for prompt, text in zip(prompts, expected, strict=True):
            answer = cluster.client().completions.create(
                model=name,
                prompt=prompt,
                max_tokens=GREEDY.max_tokens,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert answer.choices[0].text == text
        explained = str(cluster.get(f"/explain/{answer.id}"))
        assert ("'transport': 'shm'" in explained, "'kv_pull_failed': True" in explained) == (
            is_pulled,
            not is_pulled,
        )


def followers_of(pid: int) -> list[int]:
    """Processes of ranks 1, 2, ... below `pid`."""
    return [child for child in descendants(pid) if "engine.tensor_parallel.follower" in command_line(child)]


def ready_workers(cluster: Cluster) -> set[str]:
    return {worker["id"] for worker in cluster.get("/v1/cluster")["workers"] if worker["state"] == "ready"}


def num_running(cluster: Cluster, worker: str) -> int:
    loads = {found["id"]: found["load"] for found in cluster.get("/v1/cluster")["workers"]}
    return int(loads[worker]["running"])


@pytest.mark.parametrize("flag", ["--tp=2", pytest.param("--pp=2", marks=pytest.mark.soak)])
def test_a_killed_rank_ends_its_worker_and_no_answer(reference: LLM, flag: str) -> None:
    """And ranks end with their engine. Prefill has ranks, too; one decode worker has none, and takes over."""
    params = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    expected = [completion.text for completion in reference.generate(PROMPTS, params)]
    role_args = {"prefill-0": [flag], "decode-0": [flag]}
    with running_cluster(num_decode=2, engine_args=ENGINE, role_args=role_args) as cluster:
        texts: dict[int, str] = {}

        def ask(index: int) -> None:
            texts[index] = complete(cluster, PROMPTS[index], params)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(PROMPTS))]
        worker = cluster.services["decode-0"]
        (follower,) = followers_of(worker.pid)
        for thread in threads:
            thread.start()
        while not num_running(cluster, "decode-0"):
            assert any(thread.is_alive() for thread in threads), "all was answered before the kill"
        began = time.monotonic()
        os.kill(follower, signal.SIGKILL)
        assert any(thread.is_alive() for thread in threads)
        while "decode-0" in ready_workers(cluster):
            assert time.monotonic() - began < 60.0, worker.log()
            time.sleep(0.02)
        for thread in threads:
            thread.join(200.0)
        assert [texts[index] for index in range(len(PROMPTS))] == expected
        (follower,) = followers_of(cluster.services["prefill-0"].pid)
        cluster.services["prefill-0"].kill()
        deadline = time.monotonic() + 60.0
        while Path(f"/proc/{follower}").exists():
            assert time.monotonic() < deadline, "a rank outlives its engine"
            time.sleep(0.02)


@pytest.mark.soak
def test_a_stopped_stage_takes_its_worker_out_of_service() -> None:
    with running_cluster(0, 1, engine_args=ENGINE, worker_args=("--pp=2",)) as cluster:
        complete(cluster, "one", GREEDY)
        (follower,) = followers_of(cluster.services["decode-0"].pid)
        os.kill(follower, signal.SIGSTOP)
        try:
            until_stopped(follower)
            thread = threading.Thread(target=complete, args=(cluster, "two", GREEDY))
            thread.start()
            began = time.monotonic()
            while ready_workers(cluster):
                assert time.monotonic() - began < 60.0
                time.sleep(0.1)
        finally:
            os.kill(follower, signal.SIGCONT)
        thread.join(200.0)
        began = time.monotonic()
        while ready_workers(cluster) != {"decode-0"}:
            assert time.monotonic() - began < 60.0
            time.sleep(0.1)
