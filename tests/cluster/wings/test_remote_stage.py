"""A stage on another host: the tokens of one process, what is refused, and what happens when either side ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.errors import ConfigError, EngineError
from engine.assembly import EngineParts
from engine.engine import DeviceLostError
from engine.pipeline_parallel.remote_stage import TOKEN_VARIABLE
from mini_infer import LLM, SamplingParams
from tests.cluster.test_two_hosts import THERE, OtherHost, other_host  # noqa: F401 - a fixture
from tests.cluster.wings.test_tensor_parallel import GREEDY, PROMPTS, complete
from tests.engine.bidirectional.test_bidirectional import expected, saved
from tests.engine.combinations import MODELS, open_engine
from tests.engine.combinations import PROMPTS as IDS
from tests.engine.driving import serve
from tests.engine.pooling.test_vectors import assert_close, engine, prompts_of, vectors
from tests.harness.cluster import ROOT, free_ports, running_cluster
from tests.harness.processes import followers_of, until_gone
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.soak

SETTINGS = {"num_gpu_blocks": 256, "quant_mode": "none"}
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=24, temperature=1.1, seed=5, presence_penalty=0.4, ignore_eos=True),
    GREEDY,
]


@dataclass
class Stage:
    process: subprocess.Popen[bytes]
    address: str

    def follower(self) -> int:
        """The process that serves an engine."""
        (found,) = followers_of(self.process.pid)
        return found


def accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret")
    [port] = free_ports(1)
    process = subprocess.Popen([sys.executable, "-m", "worker.ranks.stage", f"--port={port}"], cwd=ROOT)
    try:
        wait_until(lambda: accepts_connections(port))
        yield Stage(process, f"127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(60.0)
        finally:
            process.kill()
            process.wait()


def test_an_engine_and_the_next_one(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [one.token_ids for one in LLM("dry-run", num_threads=1, **SETTINGS).generate(PROMPTS, PARAMS)]
    for num_drafts in (0, 3):
        llm = LLM("dry-run", pp=2, stage_address=stage.address, num_speculative_tokens=num_drafts, **SETTINGS)
        assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == expected
        with pytest.raises(ConfigError, match="no free stage answers"):
            LLM("dry-run", pp=2, stage_address=stage.address, **SETTINGS)
        os.kill(stage.follower(), signal.SIGKILL)
        with pytest.raises(EngineError) as raised:
            llm.generate(PROMPTS, PARAMS)
        assert isinstance(raised.value.__cause__, DeviceLostError)
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    with pytest.raises(ConfigError, match="another cluster token"):
        LLM("dry-run", pp=2, stage_address=stage.address, **SETTINGS)


@pytest.mark.parametrize("name", ["latents and experts", "packed", "gguf"])
def test_models_of_all_kinds(name: str, tmp_path: Path, stage: Stage) -> None:
    save, settings, _ = MODELS[name]
    path = save(tmp_path / "m")
    plain = open_engine(path, **settings)
    staged = open_engine(path, pp=2, stage_address=stage.address, **settings)
    assert stage.follower()
    assert staged.loaded.quant_mode == plain.loaded.quant_mode
    assert tokens_of(staged) == tokens_of(plain)


def tokens_of(parts: EngineParts) -> list[list[int]]:
    return [request.output_token_ids for request in serve(parts.engine, IDS, GREEDY.max_tokens)]


def test_a_stage_of_attention_to_later_tokens(tmp_path: Path, stage: Stage) -> None:
    """With windows, which each stage has in some of its layers."""
    made = engine(saved("embeddinggemma", tmp_path), pp=2, stage_address=stage.address, num_gpu_blocks=256)
    assert stage.follower()
    assert_close(vectors(made, prompts_of(), "mean"), expected("embeddinggemma", prompts_of(), "mean"))


def test_a_stage_ends_with_its_engine(stage: Stage) -> None:
    code = "from mini_infer import LLM; import sys; LLM('dry-run', pp=2, stage_address=sys.argv[1]); input()"
    engine = subprocess.Popen([sys.executable, "-c", code, stage.address], cwd=ROOT, stdin=subprocess.PIPE)
    try:
        wait_until(lambda: followers_of(stage.process.pid))
        follower = stage.follower()
    finally:
        engine.kill()
        engine.communicate()
    until_gone(follower)
    assert stage.process.poll() is None


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"stage_address": "host:1"}, "for --pp 2"),
        ({"pp": 3, "stage_address": "host:1"}, "for --pp 2"),
        ({"pp": 2, "stage_address": "host"}, "give host:port"),
        ({"pp": 2, "tp": 2, "stage_address": "host:1"}, "--stage-address with --tp"),
        ({"pp": 2, "stage_address": "127.0.0.1:1"}, "no free stage answers there"),
    ],
    ids=str,
)
def test_what_is_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM("dry-run", **SETTINGS, **settings)


def test_a_worker_of_two_hosts(other_host: OtherHost, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The stage in a network namespace of its own; a prefill worker's KV cannot reach it, and is computed."""
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret of both hosts")
    expected = [one.text for one in LLM("dry-run", num_threads=1, **SETTINGS).generate(PROMPTS, GREEDY)]
    [port] = free_ports(1)
    argv = other_host.argv("/mnt", sys.executable, "-m", "worker.ranks.stage", f"--host={THERE}", f"--port={port}")
    far = subprocess.Popen(argv, cwd=ROOT)
    try:
        probe = ["bash", "-c", f"exec 3<>/dev/tcp/{THERE}/{port}"]
        wait_until(lambda: subprocess.run(probe, capture_output=True).returncode == 0)
        flags = ["--pp=2", f"--stage-address={THERE}:{port}"]
        engine_args = ("--model=dry-run", "--num-gpu-blocks=256", "--quant-mode=none", "--num-threads=1")
        with running_cluster(engine_args=engine_args, role_args={"decode": flags}) as cluster:
            assert [complete(cluster, prompt, GREEDY) for prompt in PROMPTS] == expected
            assert "cannot reach the stage" in cluster.services["decode-0"].log()
            [told] = [found for found in cluster.get("/v1/cluster")["workers"] if found["id"] == "decode-0"]
            assert told["transports"] == []  # so that its role cannot change
            subprocess.run(["ip", "link", "set", other_host.link, "down"], check=True)
            wait_until(lambda: "decode-0" not in cluster.ready_workers())
    finally:
        far.kill()
        far.wait()
