"""Tokens that the last stage of a pipeline returns to the first: whoever ends, each row continues behind its own."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu import stages
from engine.gpu.config import GpuConfig, returns_tokens
from engine.gpu.stages import NcclTokenSink, NcclTokenSource
from engine.parallel.group import GlooGroup
from engine.request import FinishReason, RequestOutput, SamplingParams
from kvstore.layout import Shard
from tests.gpu.models import save_family
from tests.gpu.test_engine import ON_GPU, PROMPTS, generate, greedy, reference
from tests.gpu.test_pipeline_parallel import RunnerHere, open_processes, open_stages, two_gpus

SAMPLED = [SamplingParams(max_tokens=12, temperature=0.3, seed=seed, ignore_eos=True) for seed in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of its own, or each token would be the one before."""
    return save_family(tmp_path_factory.mktemp("model"), {"tie_word_embeddings": False})


def stopping(tokens: Sequence[Sequence[int]]) -> list[SamplingParams]:
    """SAMPLED, of which every other one stops at one of its `tokens`, each at a later one."""
    return [
        replace(params, stop_token_ids=(own[2 + index],)) if index % 2 else params
        for index, (params, own) in enumerate(zip(SAMPLED, tokens, strict=False))
    ]


def test_who_has_no_way_back() -> None:
    config = EngineConfig("model", pp=2)
    assert returns_tokens(config, GpuConfig())
    assert not returns_tokens(config, GpuConfig(overlap=False))
    changes: list[dict[str, Any]] = [{"pp": 1}, {"stage_address": "there:7070"}, {"num_speculative_tokens": 2}]
    assert not any(returns_tokens(replace(config, **each), GpuConfig()) for each in changes)


def num_returned(made: Engine) -> int:
    runner = made._runner
    assert isinstance(runner, RunnerHere)
    return runner.ways[0].num_passed


def test_requests_that_stop_leave_a_row_in_flight_that_nobody_sees(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others take their blocks and rows on the device meanwhile. Steps of three rows are padded to four."""
    params = stopping(generate(reference(model), SAMPLED, PROMPTS * 2))
    expected = generate(reference(model), params, PROMPTS * 2)
    assert min(map(len, expected)) < 6
    made = open_stages(
        model, 2, monkeypatch, GpuConfig(), block_size=4, num_gpu_blocks=64, max_num_seqs=6, max_num_batched_tokens=16
    )
    assert generate(made, params, PROMPTS * 2) == expected
    assert made.num_failed_steps == 0
    num_followed = sum(len(tokens) - 1 for tokens in expected)
    assert num_returned(made) > 0.6 * num_followed  # the rest were known: few requests are there in the end


@pytest.mark.soak
def test_three_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one in the middle needs no tokens."""
    model = save_family(tmp_path, {"num_hidden_layers": 3, "tie_word_embeddings": False})
    runs = greedy(8), stopping(generate(reference(model), SAMPLED[:4]))
    expected = [generate(reference(model), params) for params in runs]
    made = open_stages(model, 3, monkeypatch, GpuConfig(), block_size=8, max_num_batched_tokens=16)
    assert [generate(made, params) for params in runs] == expected
    assert made.num_failed_steps == 0
    assert num_returned(made) > 20


@pytest.mark.soak
def test_a_request_in_flight_may_fail_or_be_cancelled_and_named_again_or_handed_over(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(reference(model), greedy(12))
    made = open_stages(model, 2, monkeypatch, GpuConfig(), block_size=4, max_num_batched_tokens=16)
    draw = random.Random(3)
    failing = made.add_request(PROMPTS[0], SamplingParams(allowed_token_ids=(7,), bad_words=((7,),), seed=0))
    errors: list[RequestOutput] = []
    live = [made.add_request(prompt, params) for prompt, params in zip(PROMPTS, greedy(12), strict=True)]
    for _ in range(16):
        errors += [output for output in made.step() if output.error]
        index = draw.randrange(len(PROMPTS))
        if draw.random() < 0.5 and made.abort(live[index].request_id) is not None:
            live[index] = made.add_request(PROMPTS[index], greedy(12)[0], request_id=live[index].request_id)
    made.hand_over(live[0].request_id)
    while made.has_work():
        for output in made.step():
            if output.finish_reason is FinishReason.PREFILLED:
                made.scheduler.kv.pool.release(made.scheduler.detach_blocks(output.request))
    assert [output.request for output in errors] == [failing]
    found = [request.output_token_ids for request in live]
    assert found[1:] == expected[1:]
    assert 0 < len(found[0]) < 12
    assert found[0] == expected[0][: len(found[0])]
    assert made.num_failed_steps == 0
    made.scheduler.kv.pool.check_integrity()


@dataclass
class FakeEvent:
    """Notes before which step it was recorded."""

    now: list[int]
    at: int = -1

    def record(self) -> None:
        self.at = self.now[0]


class FakeStream:
    """Notes for which events it was to wait, and before which step that was."""

    waited: ClassVar[list[tuple[int, int]]]

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append((event.at, event.now[0]))


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets it stand in for NCCL on a CPU. The number of the next step is to be put into the list."""
    now = [0]
    if ON_GPU:
        pytest.skip("gloo stands in for NCCL on a CPU")
    monkeypatch.setattr(FakeStream, "waited", [], raising=False)
    monkeypatch.setattr(stages, "_open_pair", _open_gloo)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(now))
    return now


def _open_gloo(store: Path, rank: int) -> Any:
    folder = store.with_suffix(".pair")
    folder.mkdir(exist_ok=True)
    return GlooGroup(Shard(rank, 2), folder)._group


def test_both_ends_agree_on_messages(gloo: list[int], tmp_path: Path) -> None:
    """The sink waits for the end of the step as many before as there are stages, no later one's."""
    num_stages, max_rows = 3, 6
    steps: list[Sequence[int]] = [[], [], [], [0, 4], [], [5, 1, 2], [3]]
    cpu, taken = torch.device("cpu"), torch.full((max_rows,), -1)

    def be_first() -> None:
        source = NcclTokenSource(tmp_path / "store", max_rows, cpu)
        for rows in steps:
            source.pass_on(taken, rows)

    thread = threading.Thread(target=be_first, daemon=True)
    thread.start()
    sink = NcclTokenSink(tmp_path / "store", max_rows, num_stages, cpu)
    last_tokens = torch.arange(100, 100 + max_rows)
    for number, rows in enumerate(steps):
        gloo[0] = number
        sink.pass_on(last_tokens, rows)
    thread.join(60.0)
    assert not thread.is_alive()
    assert taken.tolist() == last_tokens.tolist()
    assert [at for at, _ in FakeStream.waited] == [number - num_stages + 1 for _, number in FakeStream.waited]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.usefixtures("gloo")
def test_stages_of_ranks_connect(count: int, tmp_path: Path) -> None:
    """None waits for one that waits for it, and only the first stage and the last one pass tokens."""
    config = EngineConfig("model", pp=count, tp=2, max_num_seqs=4, max_num_batched_tokens=16)

    found: dict[tuple[int, int], type] = {}

    def connect(rank: int, index: int) -> None:
        shape: Any = SimpleNamespace(num_layers=2 * count, hidden_size=4)
        shard = Shard(rank, 2, layers=(2 * index, 2 * index + 2))
        loaded: Any = SimpleNamespace(shard=shard, config=shape, device=torch.device("cpu"), dtype=torch.float32)
        found[rank, index] = type(stages.open_ends(loaded, config, GpuConfig(), tmp_path).tokens)

    places = [(rank, index) for rank in range(2) for index in range(count)]
    threads = [threading.Thread(target=connect, args=place, daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    kinds = [found.get(place) for place in places]
    assert kinds == [NcclTokenSource, *[type(None)] * (count - 2), NcclTokenSink] * 2


@two_gpus
@pytest.mark.parametrize("graphs", [True, False])
def test_nccl_returns_tokens(graphs: bool, model: Path) -> None:
    """Many requests that come, stop and are cancelled while their next rows are in flight."""
    prompts = [[(5 * i + 3 * j) % 97 for j in range(3 + 7 * i % 40)] for i in range(24)]
    params = [replace(SAMPLED[0], seed=seed, max_tokens=24, stop_token_ids=(seed, 50)) for seed in range(24)]
    found = []
    for pp in (1, 2):
        made = open_processes(model, pp, GpuConfig(use_cuda_graph=graphs))
        assert made._runner.max_steps_in_flight == pp + 1
        found.append([generate(made, params, prompts), generate(made, greedy(40))])
        live = [made.add_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        for _ in range(30):
            made.step()
        for request in live[::3]:
            made.abort(request.request_id)
        while made.has_work():
            made.step()
        del live[::3]
        found[-1].append([request.output_token_ids for request in live])
        del made
        gc.collect()
    assert found[0] == found[1]


def take_tokens(folder: Path, rows: Sequence[Sequence[int]], found: list[Tensor]) -> None:
    """Be the first stage, on the second GPU."""
    with torch.cuda.device(1):
        last_tokens = torch.zeros(8, dtype=torch.int64, device="cuda:1")
        source = NcclTokenSource(folder / "store", 8, last_tokens.device)
        for each in rows:
            source.pass_on(last_tokens, each)
            found.append(last_tokens.cpu())


@two_gpus
def test_nccl_does_not_wait_for_later_steps(tmp_path: Path) -> None:
    """Tokens of a step are there while the step behind it still runs on the last stage."""
    found: list[Tensor] = []
    rows: list[Sequence[int]] = [[], [], [3, 4], [], [1, 2]]  # once before, so that kernels are loaded
    thread = threading.Thread(target=take_tokens, args=(tmp_path, rows, found), daemon=True)
    thread.start()
    with torch.cuda.device(0):
        last_tokens = torch.zeros(8, dtype=torch.int64, device="cuda:0")
        sink = NcclTokenSink(tmp_path / "store", 8, 2, last_tokens.device)
        for each in rows[:3]:
            sink.pass_on(last_tokens, each)
        last_tokens[1:3] = torch.tensor([5, 6], device="cuda:0")
        torch.cuda.synchronize()
        sink.pass_on(last_tokens, rows[3])
        torch.cuda._sleep(20_000_000_000)  # cycles: ten seconds of the step behind
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        end.record()  # type: ignore[no-untyped-call]
        sink.pass_on(last_tokens, rows[4])
        thread.join(60.0)
        assert not end.query()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    assert found[-1].tolist() == [0, 5, 6, 0, 0, 0, 0, 0]
