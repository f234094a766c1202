"""The GPU engine on two ranks that dispatch rows to experts: processes over files, with interpreted kernels.

`tests/gpu/tensor_parallel/test_tensor_parallel.py` covers GPUs.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from benchmarks.experts.layers import make_block, make_rows
from common.model_files import ModelFiles
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.expert_balancing.loads import ExpertLoadRecorder, placement_of
from engine.expert_parallel.exchange import ExchangeForm
from engine.expert_parallel.gpu_divided_rows import DispatchedExperts
from engine.gpu.runner import GpuRunner
from engine.gpu.steps.rows import most_tokens
from engine.kv.memory import allocate_pool, pool_geometry
from engine.layers.linear import Linear
from engine.loader.load import LoadedModel, load_model
from engine.moe.expert_stacks import StackedExperts
from engine.moe.moe import Moe
from engine.plan import PlacedExperts, StepPlan
from engine.tensor_parallel.gpu_seams import gpu_ranks
from engine.tensor_parallel.group import GlooGroup
from kernels.gpu.collectives.all_reduce import GATHER_CHUNK, SymmetricMemory, all_gather, symmetric_bytes
from kernels.gpu.expert_parallel.exchange_memory import ExchangeLayout, ExchangeMemory, rows_a_rank
from kvstore.layout import Shard
from tests.engine.driving import engine_config
from tests.engine.expert_balancing.balancing import balancing_of
from tests.gpu.mla.test_latents import V2
from tests.gpu.models import save_family, use_small_tiles
from tests.gpu.test_engine import PROMPTS, generate, greedy, open_gpu
from tests.kernels.helpers import relative_error
from tests.kernels.rank_processes import make_files, map_files, run_ranks

SIZE, NUM_TOKENS, MAX_ROWS = 2, 3, 4
CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "num_gpu_blocks": 64, "max_num_seqs": MAX_ROWS, "max_num_batched_tokens": 16, "max_model_len": 96
}  # fmt: skip
CHANGES = [
    PlacedExperts(0, (3, 1, 2, 0, 4, 5)),
    None,
    PlacedExperts(1, (0, 4, 5, 3, 1, 2)),
    PlacedExperts(0, (5, 4, 3, 2, 1, 0)),
]
GATHER_BYTES = symmetric_bytes(SIZE, MAX_ROWS, GATHER_CHUNK, torch.float32)


HIDDEN, TOP_K = cast(int, V2["hidden_size"]), cast(int, V2["num_experts_per_tok"])
MOST = rows_a_rank(most_tokens(EngineConfig("m", **SETTINGS)), SIZE)
LAYOUT = ExchangeLayout(SIZE, MOST, HIDDEN, TOP_K, torch.float32)


class FileGroup:
    """The parts of a `DeviceGroup` that a runner needs."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self.size, self.dtype = rank, SIZE, torch.float32
        gathers = map_files(folder, "gather", SIZE, GATHER_BYTES)
        self._gathers = SymmetricMemory(
            torch.tensor([each.data_ptr() for each in gathers]), torch.zeros(MAX_ROWS, dtype=torch.int32), rank, SIZE,
            MAX_ROWS, GATHER_CHUNK, torch.float32,
        )  # fmt: skip
        rows = map_files(folder, "rows", SIZE, LAYOUT.num_bytes)
        addresses = torch.tensor([each.data_ptr() for each in rows])
        self.rows = ExchangeMemory.over(LAYOUT, rank, addresses, rows[rank], counts=True)

        (folder / "gloo").mkdir(exist_ok=True)
        self.all_to_all = GlooGroup(Shard(rank, SIZE), folder / "gloo").all_to_all

    def all_gather(self, x: Tensor, only: Tensor | None = None) -> Tensor:
        return all_gather(x, self._gathers, only)


def check_block(form: ExchangeForm, rank: int, memory: ExchangeMemory) -> None:
    """Check that the output of a block of experts for this rank's rows is that of the whole block."""
    options = Namespace(hidden=HIDDEN, inner=32, experts=6, top_k=TOP_K, dtype="float32")
    x = make_rows(9, rank, options, CPU)
    expected = make_block(options, CPU, "uniform")(x, None)  # type: ignore[arg-type]  # experts do not use a step
    for slots in ((), (0, 1, 2, 3, 0, 1, 4, 5)):  # the second with replicas
        block = make_block(options, CPU, "uniform", Shard(rank, SIZE), slots)
        experts = StackedExperts(block)
        out = DispatchedExperts(block, experts, Linear(experts.router), memory, form).output(x, 9 * SIZE)
        assert relative_error(out, expected) < 1e-5


def run_engine(folder: Path, rank: int) -> None:
    """Run this rank's own engine, which makes the same plans as the other rank's."""
    with pytest.MonkeyPatch.context() as patch:
        run_rank(folder, rank, patch)


def run_rank(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> None:
    use_small_tiles(patch, 4)
    group, counting, shards = FileGroup(folder, rank), list[ExpertLoadRecorder](), list[LoadedModel]()

    def make_runner(loaded: LoadedModel, pool: Tensor, _host: None, config: Any, gpu: GpuConfig, length: int) -> Any:
        of_rank = engine_config(
            str(folder), device="cpu", dtype="float32", quant_mode="none", block_size=config.block_size, tp=SIZE,
            expert_parallel=True, expert_exchange="dispatch", expert_rebalance_interval=1, **SETTINGS,
        )  # fmt: skip
        shard = load_model(ModelFiles("m", "directory", folder), of_rank, CPU, Shard(rank, SIZE))
        shards.append(shard)
        if rank == 0:
            counting.append(ExpertLoadRecorder(shard.model, None))
        geometry = pool_geometry(shard.config, of_rank, shard.fingerprint, shard.dtype, shard.shard)
        ranks = gpu_ranks(shard, of_rank, cast(Any, group))
        runner = GpuRunner(shard, allocate_pool(geometry, CPU), None, of_rank, gpu, length, ranks)
        launch, changes = runner.launch, cycle(CHANGES)

        def launch_changed(plan: StepPlan) -> Any:
            plan.placed = next(changes)
            return launch(plan)

        runner.launch = launch_changed  # type: ignore[method-assign]
        return runner

    patch.setattr(sys.modules[open_gpu.__module__], "GpuRunner", make_runner)
    made, _ = open_gpu(folder, patch, GpuConfig(), **SETTINGS)
    for recorder in counting:
        recorder.restart()
    tokens = generate(made, greedy(NUM_TOKENS), PROMPTS[:2])
    counts = [recorder.start_copy().values for recorder in counting]
    blocks = [block for block in shards[-1].model.blocks if isinstance(block, Moe)]
    assert {(layer, placement_of(block)) for layer, block in enumerate(blocks)} < {
        (change.index, change.slots) for change in CHANGES if change is not None
    }
    assert group.rows.moved is not None
    for form in ExchangeForm:
        check_block(form, rank, group.rows)
    torch.save((tokens, group.rows.moved.tolist(), counts), folder / f"found{rank}.pt")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's processes share files")
def test_ranks_that_dispatch_rows_give_the_tokens_of_the_plain_engine(tmp_path: Path) -> None:
    """Prompt chunks next to decode rows, steps of one row, a dense layer, and shared experts.

    Experts change ranks in most steps. The first rank counts the choices of its rows.
    """
    save_family(tmp_path, V2)
    make_files(tmp_path, "gather", SIZE, GATHER_BYTES)
    make_files(tmp_path, "rows", SIZE, LAYOUT.num_bytes)
    run_ranks(run_engine, tmp_path, SIZE)
    config = engine_config(
        str(tmp_path), device="cpu", dtype="float32", quant_mode="none", num_gpu_blocks=64,
        expert_load_file=str(tmp_path / "loads"),
    )  # fmt: skip
    plain = assemble(config)
    expected = generate(plain.engine, greedy(NUM_TOKENS), PROMPTS[:2])
    found = [torch.load(tmp_path / f"found{rank}.pt") for rank in range(SIZE)]
    assert [tokens for tokens, *_ in found] == [expected] * SIZE
    counted, (first,) = balancing_of(plain).loads.start_copy().values, found[0][2]
    assert (first <= counted).all()
    assert (counted.sum(dim=1) <= first.sum(dim=1) * SIZE).all()  # it has half of each step's rows, or one more
    assert first.sum() < counted.sum()
    (sent, returned), (came, sent_back) = found[0][1], found[1][1]
    assert 0 < sent == sent_back
    assert 0 < came == returned
