"""Collectives between ranks that are late at random: rows are never overwritten before they are read."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.elementwise import rms_norm
from kernels.gpu.expert_parallel.divided_rows import combine_add_rms_norm, scatter_add_rms_norm
from kernels.gpu.expert_parallel.exchange_memory import ExchangeLayout, ExchangeMemory, own_rows, rows_a_rank
from kernels.gpu.expert_parallel.expert_dispatch import dispatch
from tests.kernels.rank_processes import make_files, map_files, run_ranks

SIZE, N, TOP_K, HELD, EPS = 4, 16, 2, 2, 1e-5
MAX_TOKENS, NUM_STEPS = 13, 40
LAYOUT = ExchangeLayout(SIZE, rows_a_rank(MAX_TOKENS, SIZE), N, TOP_K, torch.float32)
WEIGHT = torch.ones(N)


def steps() -> list[tuple[int, bool]]:
    """Return the number of tokens of each step, and whether it has a block of experts."""
    rng = random.Random(5)
    return [(rng.randint(1, MAX_TOKENS), rng.random() < 0.7) for _ in range(NUM_STEPS)]


def output(step: int, rank: int, tokens: int) -> Tensor:
    """Return a rank's partial output of a block."""
    return torch.randn(tokens, N, generator=torch.Generator().manual_seed(1000 * step + rank))


def choices(step: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return shares and experts; in some steps nearly all experts are the first rank's."""
    scores = torch.rand(tokens, SIZE * HELD, generator=torch.Generator().manual_seed(step))
    scores[:, :HELD] += 3 * (step % 3 == 0)
    shares, chosen = scores.topk(TOP_K)
    return shares, chosen.int()


def run_rank(folder: Path, rank: int) -> None:
    mapped = map_files(folder, "rows", SIZE, LAYOUT.num_bytes)
    addresses = torch.tensor([each.data_ptr() for each in mapped])
    memory = ExchangeMemory.over(LAYOUT, rank, addresses, mapped[rank], counts=False)
    rng, found = random.Random(rank), []

    def be_late() -> None:
        if rng.random() < 0.4:
            time.sleep(rng.random() * 0.05)

    for step, (tokens, has_experts) in enumerate(steps()):
        rows, own = rows_a_rank(tokens, SIZE), own_rows(tokens, memory)
        residual = torch.zeros(rows, N)
        be_late()
        x = scatter_add_rms_norm(
            output(step, rank, tokens), residual, WEIGHT, EPS, memory, gathers=not has_experts
        )  # fmt: skip
        if has_experts:
            shares, chosen = (
                torch.cat([each[rank * rows : rank * rows + own], each.new_zeros(rows - own, TOP_K)])
                for each in choices(step, tokens)
            )
            be_late()
            came = dispatch(x, shares, chosen, tokens, HELD, memory)
            be_late()
            scaled = came.x * (came.shares * (1.0 + came.chosen + rank * HELD)).t()[..., None]
            parts = torch.where((came.chosen >= 0).t()[..., None], scaled, float("nan")).contiguous()
            be_late()
            x = combine_add_rms_norm(parts, came, residual, WEIGHT, EPS, memory, gathers=True)
        found.append(x)
    torch.save(found, folder / f"found{rank}.pt")


def expected(step: int, tokens: int, has_experts: bool) -> Tensor:
    residual = torch.stack([output(step, rank, tokens) for rank in range(SIZE)]).sum(dim=0)
    x = rms_norm(residual, WEIGHT, EPS)
    if not has_experts:
        return x
    shares, chosen = choices(step, tokens)
    return rms_norm(residual + x * (shares * (1.0 + chosen)).sum(dim=1, keepdim=True), WEIGHT, EPS)


@pytest.mark.soak
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's processes share files")
def test_late_ranks_get_what_was_sent_to_them(tmp_path: Path) -> None:
    make_files(tmp_path, "rows", SIZE, LAYOUT.num_bytes)
    run_ranks(run_rank, tmp_path, SIZE)
    found = [torch.load(tmp_path / f"found{rank}.pt") for rank in range(SIZE)]
    for step, (tokens, has_experts) in enumerate(steps()):
        for each in found:
            torch.testing.assert_close(each[step], expected(step, tokens, has_experts), rtol=1e-5, atol=1e-5)
