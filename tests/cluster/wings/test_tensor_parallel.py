"""Workers of several ranks through HTTP: the tokens of one rank, whichever reads KV, and after a death."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from benchmarks.model_folder import with_tokenizer
from mini_infer import LLM, SamplingParams
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.processes import followers_of, until_gone, until_stopped
from tests.harness.waiting import wait_until

ENGINE = ("--model=dry-run", "--num-gpu-blocks=256", "--quant-mode=none")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.1, seed=5, presence_penalty=0.4, ignore_eos=True)
PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog. " * 5, "x" * 400]


def complete(cluster: Cluster, prompt: str, params: SamplingParams) -> str:
    fields = {"temperature": params.temperature, "seed": params.seed, "presence_penalty": params.presence_penalty}
    return cluster.complete(prompt, params.max_tokens, **fields)


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
        numbers = count()

        def is_pulled() -> bool:
            answer = cluster.ask(f"a new prompt {next(numbers)} " * 20, 4)
            return bool(cluster.legs_of(answer.id)[-1]["transport"] == transport)

        wait_until(is_pulled)  # on a busy machine a prompt may take less time to compute than to pull
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
            answer = cluster.ask(prompt, GREEDY.max_tokens, model=name)
            assert answer.choices[0].text == text
        found = cluster.legs_of(answer.id)[-1]
        assert (found["transport"] == "shm", found["kv_pull_failed"]) == (is_pulled, not is_pulled)


@pytest.mark.parametrize("flag", ["--tp=2", pytest.param("--pp=2", marks=pytest.mark.soak)])
def test_a_killed_rank_ends_its_worker_and_no_answer(reference: LLM, flag: str) -> None:
    """And ranks end with their engine. Prefill has ranks, too; one decode worker has none, and takes over."""
    params = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    expected = [completion.text for completion in reference.generate(PROMPTS, params)]
    role_args = {"prefill-0": [flag], "decode-0": [flag]}
    with running_cluster(num_decode=2, engine_args=ENGINE, role_args=role_args) as cluster:
        (follower,) = followers_of(cluster.services["decode-0"].pid)
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(complete, cluster, prompt, params) for prompt in PROMPTS]
            while not cluster.load_of("decode-0")["running"]:
                assert not all(answer.done() for answer in answers), "all was answered before the kill"
            os.kill(follower, signal.SIGKILL)
            assert not all(answer.done() for answer in answers)
            wait_until(lambda: "decode-0" not in cluster.ready_workers(), message=cluster.services["decode-0"].log)
            assert [answer.result() for answer in answers] == expected
        (follower,) = followers_of(cluster.services["prefill-0"].pid)
        cluster.services["prefill-0"].kill()
        until_gone(follower)


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
            wait_until(lambda: not cluster.ready_workers())
        finally:
            os.kill(follower, signal.SIGCONT)
        thread.join(200.0)
        wait_until(lambda: cluster.ready_workers() == {"decode-0"})
