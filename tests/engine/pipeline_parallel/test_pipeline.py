"""Pipeline stages: the tokens of one process for every family, all stages busy, and all end when one of them ends."""

from __future__ import annotations

import math
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import EngineError
from engine.config import EngineConfig
from engine.kv.memory import pool_geometry
from engine.models.families import family_of
from engine.models.hf_config import config_from_hf, read_hf_config
from engine.pipeline_parallel.socket_frames import SocketSink, SocketSource, receive_frame, send_frame
from engine.pipeline_parallel.staged import _divide, divide_layers, shard_of, stage_weights
from engine.tensor_parallel.followers import place_of, work_of
from engine.tensor_parallel.rank_config import divided
from mini_infer import LLM, SamplingParams
from tests.engine.conftest import Greedy
from tests.engine.driving import finish, num_drafts
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows
from tests.engine.threaded_ranks import (
    GREEDY,
    NUM_TOKENS,
    PROMPTS,
    SCARCE_BLOCKS,
    answers_of,
    open_stages,
    own_followers,
)
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE

pytestmark = pytest.mark.slow

# The other families differ within a layer, where no stage ends.
UNLIKE_IN_STAGES = [
    "deepseek-v3", "gemma3", "gpt-oss", "llama", "llama-tied-sharded", "mistral-window", "phi3-long-sharded",
    "qwen2-moe-windows", "qwen3-moe-some-dense",
]  # fmt: skip
SWAPPING: dict[str, Any] = {
    "num_gpu_blocks": 24, "block_size": 4, "max_num_batched_tokens": 24, "preemption": "swap", "host_tier_gb": 0.01,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "count", "tp", "settings"),
    [
        *((name, count, 1, {}) for name, count in zip(UNLIKE_IN_STAGES, cycle([3, 2]), strict=False)),
        ("llama", 2, 2, SWAPPING),
        ("qwen3-moe", 2, 2, SWAPPING),
    ],
)
def test_stages_give_the_tokens_of_transformers(
    name: str, count: int, tp: int, settings: dict[str, Any], greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run hits the prefix cache, or swaps blocks on all ranks of both stages."""
    path, expected = greedy(TINY_MODELS[name], PROMPTS, NUM_TOKENS)
    parts = open_stages(path, count, monkeypatch, tp, **{"max_num_batched_tokens": 40, "max_num_seqs": 6, **settings})
    for _ in range(2):
        assert answers_of(parts) == expected
    assert (parts.engine.load().num_preemptions > 0) == (settings is SWAPPING)


@pytest.mark.parametrize(
    ("name", "count", "tp", "preemption"),
    [
        ("llama", 2, 1, "recompute"),
        ("llama", 2, 2, "swap"),
        ("gemma3", 3, 1, "swap"),
        ("gpt-oss", 2, 2, "swap"),
        ("mistral-window", 2, 1, "swap"),
    ],
)
def test_stages_take_drafts(
    name: str, count: int, tp: int, preemption: str, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some drafts are right, other steps are in flight, and requests preempt each other; also with windows."""
    path, expected = greedy(TINY_MODELS[name], PROMPTS, NUM_TOKENS)
    known = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    draft_with(monkeypatch, MakeOracle(knows(known), 0.7, VOCAB_SIZE))
    parts = open_stages(
        path, count, monkeypatch, tp, num_speculative_tokens=4, adaptive_drafts=False,
        num_gpu_blocks=SCARCE_BLOCKS.get(name, 24), block_size=4, max_num_seqs=6, max_num_batched_tokens=24,
        preemption=preemption, host_tier_gb=0.01,
    )  # fmt: skip
    for _ in range(2):
        assert answers_of(parts) == expected
    assert parts.engine.load().num_preemptions > 0
    drafted, accepted = num_drafts(parts.engine)
    assert 0 < accepted < drafted


def test_a_request_in_flight_may_be_aborted_and_named_again(greedy: Greedy, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = greedy(TINY_MODELS["llama"], PROMPTS, NUM_TOKENS)
    parts = open_stages(path, 2, monkeypatch, max_num_batched_tokens=40, max_num_seqs=6)
    draw = random.Random(3)
    live = [parts.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(12):
        parts.engine.step()
        if draw.random() < 0.5:
            parts.runner.start_queued()  # as before blocks are given to loads
            assert all(step.pending for step in parts.runner.in_flight)
        index = draw.randrange(len(PROMPTS))
        if parts.engine.abort(live[index].request_id) is not None:
            live[index] = parts.engine.add_request(PROMPTS[index], GREEDY, request_id=live[index].request_id)
    finish(parts.engine)
    assert [request.output_token_ids for request in live] == expected


def test_all_stages_have_a_step_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of steps in flight at the same time are equal shares, and every request gets a token in each round."""
    parts = open_stages(TINY_MODELS["llama"].save(tmp_path), 3, monkeypatch, max_num_batched_tokens=40)
    in_flight, sizes = [], []
    params = replace(GREEDY, max_tokens=20)
    for prompt in PROMPTS:
        parts.engine.add_request(prompt, params)
    while parts.engine.has_work():
        sizes.append(len(parts.engine.step().plan.rows))
        in_flight.append(len(parts.runner.in_flight))
    assert in_flight.count(2) > 0.9 * len(in_flight)  # and a third one was, until its result was read
    assert sizes.count(2) > 0.7 * len(sizes)  # of six
    assert parts.engine.num_steps < 3 * 20 + 12


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.soak)])
def test_processes_are_ranks_and_stages(tp: int, pp: int, request: pytest.FixtureRequest) -> None:
    """They must agree on penalties, log-probabilities and recomputed prompts in chunks; then one is killed."""
    if pp == 1:  # stages start by their real command
        request.getfixturevalue("forked_followers")
    params = [
        SamplingParams(
            max_tokens=70, temperature=0.9 * (index % 2), seed=index, ignore_eos=True, logprobs=2,
            repetition_penalty=1.2 - index % 3 * 0.1, min_tokens=5, top_k=30, prompt_logprobs=index % 2 or None,
        )
        for index in range(6)
    ]  # fmt: skip
    prompts = ["the same beginning, " + "abc " * (5 * index) for index in range(6)]
    settings = {"num_gpu_blocks": 14, "max_num_batched_tokens": 32, "quant_mode": "none"}
    expected = LLM("dry-run", num_threads=1, **settings).generate(prompts, params)
    has_drafts = tp == pp
    llm = LLM("dry-run", pp=pp, tp=tp, num_speculative_tokens=2 * has_drafts, adaptive_drafts=False, **settings)
    found = llm.generate(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert llm.engine.load().num_preemptions > 0
    assert (num_drafts(llm.engine)[0] > 0) == has_drafts
    lost: queue.Queue[str] = queue.Queue()
    llm.engine._runner.watch_ranks(lost.put)  # type: ignore[attr-defined]
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.1)
    followers = own_followers()
    assert len(followers) == tp * pp - 1
    os.kill(followers[-1], signal.SIGKILL)
    for prompt in ("again", "and again"):
        with pytest.raises(EngineError, match=r"rank \d"):
            llm.generate(prompt, GREEDY)
    # Seen from a thread, too: on a GPU no collective fails, and rank 0 would wait for it in a step.
    assert re.match(r"rank \d of the model ended", lost.get(timeout=60.0))


def test_hidden_states_over_a_socket() -> None:
    """They exceed the system's buffers, and the other side sends at the same time without reading."""
    ours, theirs = socket.socketpair()
    sent, lost = [torch.randn(count, 1000) for count in (1, 3000, 7)], threading.Event()
    with ours, theirs:
        sink = SocketSink(theirs, lost.set)
        for hidden in sent:
            sink.send(hidden)
        plan = bytes(range(256)) * 20_000
        thread = threading.Thread(target=send_frame, args=(ours, plan))
        thread.start()
        assert receive_frame(theirs) == plan
        thread.join()
        source = SocketSource(ours, lambda: None)
        for hidden in sent:
            found = torch.empty_like(hidden)
            source.receive(found)
            assert torch.equal(found, hidden)
        ours.close()
        sink.send(sent[1])
        assert lost.wait(60.0)


def test_a_stage_that_computes_is_told_from_one_that_does_not() -> None:
    code = "import time\nwhile True: {}\n"
    busy, idle = (subprocess.Popen([sys.executable, "-c", code.format(what)]) for what in ("pass", "time.sleep(999)"))

    def does_nothing(pid: int) -> bool:
        before = work_of(pid)
        time.sleep(0.2)
        return work_of(pid) == before == (before[0], False)

    try:
        deadline = time.monotonic() + 60.0
        while work_of(busy.pid)[0] < 5:
            assert time.monotonic() < deadline
        assert not does_nothing(busy.pid)
        while not does_nothing(idle.pid):  # it starts first
            assert time.monotonic() < deadline
        os.kill(busy.pid, signal.SIGSTOP)
        while not does_nothing(busy.pid):  # until it has seen the signal
            assert time.monotonic() < deadline
    finally:
        busy.kill()
        idle.kill()
        busy.wait()
        idle.wait()


def test_layers_are_divided_by_what_a_step_reads() -> None:
    assert _divide([4, 4, 4, 4, 4, 4], 0, 3) == [range(2), range(2, 4), range(4, 6)]
    assert _divide([4, 4, 4, 4, 4, 4], 8, 2) == [range(4), range(4, 6)]
    assert _divide([1, 1, 1, 9], 0, 2) == [range(3), range(3, 4)]
    draw = random.Random(0)
    for _ in range(50):
        sizes, head = [draw.randint(1, 9) for _ in range(draw.randint(3, 8))], draw.randint(0, 9)
        found = _divide(sizes, head, 3)
        assert [layer for part in found for layer in part] == list(range(len(sizes)))
        assert all(found)

        def largest(first: int, second: int, sizes: list[int] = sizes, head: int = head) -> float:
            return max(sum(sizes[:first]), sum(sizes[first:second]), sum(sizes[second:]) + head)

        least = min(largest(a, b) for a in range(1, len(sizes)) for b in range(a + 1, len(sizes)))
        assert largest(found[0].stop, found[1].stop) == least < math.inf


def test_a_head_of_16_bits_counts_more_beside_packed_layers() -> None:
    folder = Path(__file__).parents[3] / "benchmarks/configs/llama3.3-70b"
    model = config_from_hf(read_hf_config(folder))
    assert [len(layers) for layers in divide_layers(model, 2)] == [41, 39]
    assert [len(layers) for layers in divide_layers(replace(model, linear_bits=4), 2)] == [42, 38]


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_parts_of_the_70b_shape_fit_their_gpus(pp: int, tp: int) -> None:
    """141 GB of weights and the KV of 256 sequences of 1,152 tokens, 102 GB: all GPUs have about equal shares."""
    folder = Path(__file__).parents[3] / "benchmarks/configs/llama3.3-70b"
    config = EngineConfig(str(folder), pp=pp, tp=tp, num_gpu_blocks=256 * 19).resolved("cuda")
    model = config_from_hf(read_hf_config(folder))
    ranks, layers, of_rank = pp * tp, divide_layers(model, pp), divided(model, tp) if tp > 1 else model
    _, shapes = family_of(of_rank.architecture).skeleton(of_rank)
    weights, caches = [], []
    for rank in range(ranks):
        shard, stage = place_of(rank, config)
        index = 0 if stage is None else stage.index
        needed = stage_weights(of_rank, shapes, layers[index])
        weights.append(2 * sum(map(math.prod, needed.values())))
        geometry = pool_geometry(model, config, "f", torch.bfloat16, shard_of(shard, layers[index]))
        caches.append(geometry.pool_bytes)
    assert sum(weights) == pytest.approx(141.1e9, rel=0.001)
    assert sum(caches) == 256 * 19 * 64 * 2 * 80 * 8 * 128 * 2
    assert max(map(sum, zip(weights, caches, strict=True))) < 1.03 * (sum(weights) + sum(caches)) / ranks < 126e9


@pytest.mark.soak
def test_the_default_model_keeps_its_four_bit_weights() -> None:
    """Stages hold them as one process does, so that KV is the same."""
    whole, stages = LLM(num_threads=1, num_gpu_blocks=64), LLM(pp=3, num_gpu_blocks=64)
    prompts = ["The capital of France is", "Once upon a time", "def fib(n):"]
    params = replace(GREEDY, max_tokens=16)
    found = [[one.token_ids for one in llm.generate(prompts, params)] for llm in (whole, stages)]
    assert found[0] == found[1]
    fingerprints = {llm.engine.kv.prefixes._fingerprint for llm in (whole, stages)}
    assert len(fingerprints) == 1
