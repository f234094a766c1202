"""Pipeline stages of GPU runners give the tokens of a single runner: on one GPU, interpreted, or on two GPUs."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.assembly
from common.model_files import ModelFiles
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig, Stage
from engine.engine import Engine
from engine.gpu.lowering import Observer
from engine.gpu.runner import GpuRunner
from engine.gpu.steps.rows import RowTable
from engine.gpu.steps.samples import StepSamples
from engine.kv.memory import allocate_pool, pool_geometry
from engine.loader.load import load_model
from engine.plan import StepPlan, StepResult
from engine.prompt_graphs import shapes
from engine.ranks import Ranks
from engine.request import SamplingParams
from engine.runner import Proposer
from engine.tensor_parallel.gpu_seams import gpu_ranks
from engine.tensor_parallel.runner import ParallelRunner
from kernels.elementwise import rms_norm
from kvstore.layout import Shard
from tests.engine.driving import num_drafts
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows
from tests.gpu.kv.test_kv_groups import FULL, GEMMA3
from tests.gpu.models import save_family, save_tiny_model
from tests.gpu.tensor_parallel.test_tensor_parallel import answers_of_one_and_more, assert_a_lost_rank_is_told
from tests.gpu.test_engine import (
    ON_GPU,
    PROMPTS,
    assert_same_logprobs,
    generate,
    greedy,
    logprobs_of,
    open_gpu,
    reference,
    windowed,  # noqa: F401
)

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
SAMPLED = [
    SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=6, temperature=1.0, seed=4, top_p=0.8, top_k=30, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0.8, seed=5, presence_penalty=0.8, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0.0, bad_words=((5, 6),), prompt_logprobs=0, ignore_eos=True),
]


class Link:
    """Both ends of the connection of two stages on one device."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()

    def send(self, hidden: Tensor) -> None:
        self.sent.append(hidden.clone())

    def receive(self, hidden: Tensor) -> None:
        hidden.copy_(self.sent.popleft())


class GroupHere:
    """Has the methods of `DeviceGroup` for ranks that are threads, which run one at a time."""

    rows = None

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        self._turn = threading.Lock()  # the interpreter runs one kernel at a time
        self._barrier = threading.Barrier(size, timeout=200.0)
        self._parts: list[Tensor] = [torch.empty(0)] * size
        self._local = threading.local()

    @property
    def rank(self) -> int:
        rank: int = self._local.rank
        return rank

    def run(self, rank: int, call: Callable[[], Any]) -> Any:
        """Run `call` as this rank, in the rank's own thread."""
        self._local.rank = rank
        with self._turn:
            return call()

    def all_reduce_rms_norm(self, pending: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += torch.stack(self._exchange(pending)).sum(0)
        return rms_norm(residual, weight, eps)

    def all_gather(self, x: Tensor, _only: Tensor | None = None) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._parts[self.rank] = x
        self._wait()
        parts = list(self._parts)
        self._wait()
        return parts

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()


class StageHere:
    """The runner of a stage's ranks."""

    attention_backend = "triton"

    def __init__(self, runners: Sequence[GpuRunner], group: GroupHere | None) -> None:
        self.runners = runners
        self._group = group
        self._threads = ThreadPoolExecutor(len(runners))

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        """Call a function for all ranks, in their threads. Returns their results."""
        group, ranks = self._group, range(len(self.runners))
        if group is None:
            return [call(0)]
        return list(self._threads.map(lambda rank: group.run(rank, partial(call, rank)), ranks))

    def launch(self, plan: StepPlan) -> StepHere:
        return StepHere(self, self.each(lambda rank: self.runners[rank].launch(plan)))

    def warmup(self) -> None:
        self.each(lambda rank: self.runners[rank].warmup())

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        return self.runners[0].needs_known_tokens(plan)

    def propose_with(self, proposer: Proposer) -> None:
        self.runners[0].propose_with(proposer)

    def observe_with(self, observer: Observer) -> None:
        self.runners[0].observe_with(observer)

    @property
    def device_rows(self) -> tuple[RowTable, StepSamples]:
        return self.runners[0].device_rows


class StepHere:
    """A step of all ranks."""

    def __init__(self, stage: StageHere, pending: Sequence[Any]) -> None:
        self._stage = stage
        self._pending = pending

    def result(self) -> StepResult:
        found = self._stage.each(lambda rank: self._pending[rank].result())
        assert all(one.token_ids == found[0].token_ids for one in found), "ranks have sampled different tokens"
        result: StepResult = found[0]
        return result

    def take(self, token_ids: Sequence[Sequence[int]]) -> None:
        for pending in self._pending:
            pending.take(token_ids)


class StagesHere:
    """Replaces `Followers`: the stages before the last one, which launch a step as soon as it is sent."""

    def __init__(self, stages: Sequence[StageHere]) -> None:
        self.stages = stages
        self._in_flight: list[deque[StepHere]] = [deque() for _ in stages]

    def send(self, plan: StepPlan, _num_finished: int, sampled: Sequence[Any]) -> None:
        for stage, in_flight in zip(self.stages, self._in_flight, strict=True):
            for token_ids in sampled:
                in_flight.popleft().take(token_ids)
            in_flight.append(stage.launch(plan))

    def check(self) -> None:
        pass

    def forget_store(self) -> None:
        pass


class RunnerHere(ParallelRunner):
    """Warms up the stages one after the other."""

    stages: Sequence[StageHere]

    def warmup(self, *_: object) -> None:
        captures = self.stages[0].runners[0]._use_graphs
        for stage in self.stages:  # the first step passes through all of them; graphs hold none of it
            for runner in stage.runners:
                runner._use_graphs = False
            stage.warmup()
        for stage in self.stages:
            for runner in stage.runners:
                runner._use_graphs = captures
                if captures:
                    runner.capture()
                else:
                    runner.prompt_graphs = runner.open_prompt_graphs(captures=False)


def open_stages(
    model: Path, count: int, monkeypatch: pytest.MonkeyPatch, gpu: GpuConfig, num_ranks: int = 1, **settings: Any
) -> Engine:
    def make(loaded: Any, _pool: Tensor, host: Tensor | None, config: EngineConfig, *_: Any) -> ParallelRunner:
        files, config = ModelFiles("tiny", "directory", model), replace(config, tp=num_ranks, pp=count)
        links = [[None, *(Link() for _ in range(count - 1)), None] for _ in range(num_ranks)]
        stages = []
        for index in range(count):
            group = GroupHere(num_ranks, loaded.dtype) if num_ranks > 1 else None

            def open_rank(rank: int, index: int = index, group: GroupHere | None = group) -> GpuRunner:
                part = load_model(files, config, loaded.device, Shard(rank, num_ranks), stage=Stage(index, count))
                assert part.fingerprint == loaded.fingerprint
                geometry = pool_geometry(part.config, config, part.fingerprint, part.dtype, part.shard)
                slots = None
                if host is not None:
                    slots = torch.zeros(host.shape[0], geometry.block_bytes, dtype=torch.uint8)
                ranks = gpu_ranks(part, config, group, *links[rank][index : index + 2])  # type: ignore[arg-type]
                pool = allocate_pool(geometry, loaded.device)
                return GpuRunner(part, pool, slots, config, gpu, config.max_model_len, ranks)

            stage = StageHere([None] * num_ranks, group)  # type: ignore[list-item]
            stage.runners = stage.each(open_rank)
            stages.append(stage)
        made = RunnerHere(stages[-1], StagesHere(stages[:-1]), count, is_eager=False)  # type: ignore[arg-type]
        made.stages = stages
        return made

    monkeypatch.setattr(shapes, "PROMPT_BUCKETS", (4, 16, 64))
    monkeypatch.setattr(shapes, "FEW_ROWS", 3)
    monkeypatch.setattr(shapes, "MANY_ROWS_BUCKETS", (8, 64))
    monkeypatch.setattr(engine.assembly, "_make_runner", make)
    monkeypatch.setattr(Ranks, "num_stages", count)
    settings = {
        "quant_mode": "none", "num_gpu_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64,
        "max_model_len": 96, "dtype": "float32", **settings,
    }  # fmt: skip
    parts = assemble(EngineConfig(str(model), device="cuda" if ON_GPU else "cpu", **settings), gpu=gpu)
    parts.engine.eos_token_ids = frozenset()
    return parts.engine


def test_prompts_and_decode_steps_pass_through_stages(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(reference(model), greedy(3), PROMPTS[:2])
    made = open_stages(model, 2, monkeypatch, GpuConfig(), block_size=8, max_num_batched_tokens=16)
    assert generate(made, greedy(3), PROMPTS[:2]) == expected
    assert made.num_failed_steps == 0


def test_hidden_states_of_a_model_with_scaled_embeddings_are_scaled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_family(tmp_path, {**GEMMA3, "layer_types": [FULL] * 3})
    expected = generate(reference(saved), greedy(4), PROMPTS[:2])
    made = open_stages(saved, 2, monkeypatch, GpuConfig(), block_size=8, max_num_batched_tokens=16)
    assert generate(made, greedy(4), PROMPTS[:2]) == expected


@pytest.mark.soak  # interpreted: a minute
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 10}], ids=["whole", "chunks"])
def test_stages_on_one_device_give_the_tokens_of_one_runner(
    settings: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [generate(reference(model), params) for params in (greedy(8), SAMPLED)]
    made = open_stages(model, 2, monkeypatch, GpuConfig(), block_size=8, **settings)
    for params, tokens in zip((greedy(8), SAMPLED, greedy(8)), (*expected, expected[0]), strict=True):
        assert generate(made, params) == tokens
    assert made.num_failed_steps == 0


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"max_num_batched_tokens": 10, "block_size": 8}, marks=pytest.mark.soak)], ids=str
)
def test_stages_of_ranks_on_one_device_give_the_tokens_of_one_runner(
    settings: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(reference(model), SAMPLED)
    made = open_stages(model, 2, monkeypatch, GpuConfig(use_cuda_graph=False), num_ranks=2, **settings)
    assert generate(made, SAMPLED) == expected
    assert made.num_failed_steps == 0


@pytest.mark.soak
def test_stages_of_windows(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    expected = logprobs_of(reference(windowed))
    made = open_stages(
        windowed, 2, monkeypatch, GpuConfig(), num_gpu_blocks=22, block_size=4, max_num_batched_tokens=16
    )
    for _ in range(2):
        for ours, theirs in zip(logprobs_of(made), expected, strict=True):
            assert_same_logprobs(ours, theirs)


@pytest.mark.soak
def test_stages_take_drafts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(reference(model), greedy(12))
    drafter = MakeOracle(knows([prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]), 0.6, 97)
    draft_with(monkeypatch, drafter, on_gpu=True)
    made = open_stages(
        model, 2, monkeypatch, GpuConfig(), block_size=8, num_speculative_tokens=4, max_num_seqs=16,
        max_num_batched_tokens=16,
    )  # fmt: skip
    assert generate(made, greedy(12)) == expected
    drafted, accepted = num_drafts(made)
    assert 4 < accepted < drafted


@pytest.mark.soak
def test_stages_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path, num_experts=4)
    expected = generate(reference(model), greedy(5))
    made = open_stages(model, 2, monkeypatch, GpuConfig(use_cuda_graph=False))
    assert generate(made, greedy(5)) == expected


@pytest.mark.soak
def test_stages_swap(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(reference(model), greedy(12))
    made = open_stages(
        model, 2, monkeypatch, GpuConfig(), block_size=4, num_gpu_blocks=20, preemption="swap", host_tier_gb=0.01,
        max_num_batched_tokens=16, max_model_len=64,
    )  # fmt: skip
    assert generate(made, greedy(12)) == expected
    assert made.load().num_preemptions > 0


@pytest.mark.parametrize("mode", ["fp8", "int8-weight"])
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_quantized_stages(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers have the same form as in one runner, so tokens are the same."""
    model = save_tiny_model(tmp_path, head_dim=64, hidden=256, inner=512)
    settings: dict[str, Any] = {"dtype": "bfloat16", "quant_mode": mode}
    with monkeypatch.context() as patch:
        whole, _ = open_gpu(model, patch, GpuConfig(), **settings)
        expected = generate(whole, greedy(8))
    made = open_stages(model, 2, monkeypatch, GpuConfig(), **settings)
    found = generate(made, greedy(8))
    same = sum(a == b for one, two in zip(found, expected, strict=True) for a, b in zip(one, two, strict=True))
    assert same >= 24  # of 32: other GEMMs for the same rows may tip a choice


def open_processes(model: Path, pp: int, gpu: GpuConfig, **settings: Any) -> Engine:
    settings = {
        "quant_mode": "none", "dtype": "float32", "max_num_seqs": 8, "num_gpu_blocks": 128, **settings
    }  # fmt: skip
    config = EngineConfig(
        str(model), device="cuda", pp=pp, max_num_batched_tokens=1024, max_model_len=250, **settings
    )
    parts = assemble(config, gpu=gpu)
    parts.engine.eos_token_ids = frozenset()
    return parts.engine


@two_gpus
@pytest.mark.parametrize(("overlap", "graphs"), [(True, True), (False, True), (True, False)])
def test_two_gpus_give_the_tokens_of_one(overlap: bool, graphs: bool, model: Path) -> None:
    gpu = GpuConfig(overlap=overlap, use_cuda_graph=graphs)
    one, two = answers_of_one_and_more(lambda are_two: open_processes(model, 1 + are_two, gpu))
    assert one == two


@four_gpus
@pytest.mark.parametrize("kind", ["plain", "experts", "fp8"])
def test_four_gpus_give_the_tokens_of_one(kind: str, tmp_path: Path) -> None:
    """Two stages of two ranks each, with long prompts' sums through NCCL; quantized ones run, and end."""
    model = save_tiny_model(tmp_path, **({"num_experts": 4, "inner": 32} if kind == "experts" else {}))
    if kind == "fp8":
        model = save_tiny_model(tmp_path, head_dim=64, hidden=256, inner=512)
    settings = {"dtype": "bfloat16", "quant_mode": "fp8"} if kind == "fp8" else {}

    def opened(are_four: bool) -> Engine:
        return open_processes(model, 1 + are_four, GpuConfig(), tp=1 + are_four, **settings)

    one, four = answers_of_one_and_more(opened)
    if kind == "fp8":  # whose shards are quantized by themselves
        assert [[len(tokens) for tokens in run] for run in one] == [[len(tokens) for tokens in run] for run in four]
    else:
        assert one == four


@two_gpus
def test_two_gpus_measure_their_memory(model: Path) -> None:
    made = open_processes(model, 2, GpuConfig(gpu_memory_fraction=0.1), num_gpu_blocks=0)
    assert made.kv.pool.num_blocks > 128
    assert generate(made, greedy(5)) == generate(reference(model), greedy(5))
    del made
    gc.collect()


@two_gpus
def test_a_stage_that_dies_ends_the_engine(model: Path) -> None:
    assert_a_lost_rank_is_told(__name__, "open_processes(model, 2, GpuConfig())", model)
