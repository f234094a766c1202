"""Folds of ranks whose rows are divided, before a block that needs all rows and around one of experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.elementwise import rms_norm
from kernels.gpu.expert_parallel.divided_rows import combine_add_rms_norm, scatter_add_rms_norm
from kernels.gpu.expert_parallel.exchange_memory import ExchangeLayout, ExchangeMemory, own_rows, rows_a_rank
from kernels.gpu.expert_parallel.expert_dispatch import dispatch
from tests.kernels.rank_processes import make_files, map_files, run_ranks

SIZE, N, EPS = 3, 40, 1e-5
STEPS = (7, 1, 5)  # tokens
LAYOUT = ExchangeLayout(SIZE, rows_a_rank(max(STEPS), SIZE), N, 1, torch.bfloat16)
WEIGHT = torch.linspace(0.5, 1.5, N).to(torch.bfloat16)


def outputs(rank: int, step: int, block: int) -> Tensor:
    """Return a rank's partial output of a block for all rows."""
    generator = torch.Generator().manual_seed(100 * step + 10 * block + rank)
    return torch.randn(STEPS[step], N, generator=generator).to(torch.bfloat16)


def run_rank(folder: Path, rank: int) -> None:
    mapped = map_files(folder, "rows", SIZE, LAYOUT.num_bytes)
    addresses = torch.tensor([each.data_ptr() for each in mapped])
    memory = ExchangeMemory.over(LAYOUT, rank, addresses, mapped[rank], counts=False)
    found = []
    for step, tokens in enumerate(STEPS):
        rows = rows_a_rank(tokens, SIZE)
        residual = torch.zeros(rows, N, dtype=torch.bfloat16)
        first = scatter_add_rms_norm(outputs(rank, step, 0), residual, WEIGHT, EPS, memory, gathers=True)
        own = scatter_add_rms_norm(outputs(rank, step, 1), residual, WEIGHT, EPS, memory, gathers=False)
        assert not own[own_rows(tokens, memory) :].any()
        expert = (torch.arange(rows, dtype=torch.int32)[:, None] + rank) % SIZE  # one on each rank
        came = dispatch(own, torch.ones(rows, 1), expert, tokens, 1, memory)
        parts = (came.x.float() * (1 + rank))[None].bfloat16()
        last = combine_add_rms_norm(parts, came, residual, WEIGHT, EPS, memory, gathers=True)
        found.append((first, own[: own_rows(tokens, memory)], last))
    torch.save(found, folder / f"found{rank}.pt")


def added(residual: Tensor, y: Tensor) -> Tensor:
    return (residual.float() + y.float()).bfloat16()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's processes share files")
def test_ranks_add_norm_and_gather_what_one_rank_would(tmp_path: Path) -> None:
    make_files(tmp_path, "rows", SIZE, LAYOUT.num_bytes)
    run_ranks(run_rank, tmp_path, SIZE)
    found = [torch.load(tmp_path / f"found{rank}.pt") for rank in range(SIZE)]
    for step, tokens in enumerate(STEPS):
        rows = rows_a_rank(tokens, SIZE)
        whole = [
            torch.stack([outputs(rank, step, block).float() for rank in range(SIZE)]).sum(dim=0) for block in range(2)
        ]
        residual = added(torch.zeros(tokens, N), whole[0])
        firsts, _, lasts = ([each[step][index] for each in found] for index in range(3))
        for first in firsts:
            assert torch.equal(first, firsts[0])
            torch.testing.assert_close(first, rms_norm(residual, WEIGHT, EPS), rtol=2e-2, atol=2e-2)
        residual = added(residual, whole[1])
        own = torch.cat([each[step][1] for each in found])
        torch.testing.assert_close(own, rms_norm(residual, WEIGHT, EPS), rtol=2e-2, atol=2e-2)
        place = torch.arange(tokens)
        expert = (place % rows + place // rows) % SIZE
        residual = added(residual, own.float() * (1 + expert)[:, None])
        for last in lasts:
            assert torch.equal(last, lasts[0])
            torch.testing.assert_close(last, rms_norm(residual, WEIGHT, EPS), rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_is_refused() -> None:
    own = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
    memory = ExchangeMemory.over(LAYOUT, 0, torch.zeros(SIZE, dtype=torch.int64), own, counts=False)
    y = outputs(0, 0, 0)
    for residual in (y[:2], y[:3].float(), y[: 3 * 2 : 2]):
        with pytest.raises(ValueError, match=r"not a rank's part|must be"):
            scatter_add_rms_norm(y, residual, WEIGHT, EPS, memory, gathers=True)
