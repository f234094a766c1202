"""Dispatch and combine between interpreted processes; the engine's tests cover GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.expert_parallel.exchange import choose_all, ideal_bytes
from kernels.gpu.expert_parallel.exchange_memory import ExchangeLayout, ExchangeMemory, own_rows, rows_a_rank
from kernels.gpu.expert_parallel.expert_combine import combine
from kernels.gpu.expert_parallel.expert_dispatch import dispatch
from kernels.gpu.moe.expert_pairs import sort_pairs
from tests.kernels.rank_processes import make_files, map_files, run_ranks

SIZE, HIDDEN, HELD, TOP_K, NUM_SHARED = 3, 24, 2, 2, 1
MAX_TOKENS = 9
STEPS = [(5, "padded"), (7, "packed"), (1, "grouped"), (9, "grouped"), (4, "grouped")]  # tokens of all ranks, form


LAYOUT = ExchangeLayout(SIZE, rows_a_rank(MAX_TOKENS, SIZE), HIDDEN, TOP_K, torch.bfloat16)


def inputs(step: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, shares, choices of all ranks' tokens; every third token prefers the first rank's experts."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(num_tokens, SIZE * HELD, generator=generator)
    scores[::3, :HELD] += 2
    shares, chosen = scores.topk(TOP_K)
    shared = torch.tensor([[SIZE * HELD + j for j in range(NUM_SHARED)]]).expand(num_tokens, -1)
    shares = torch.cat([shares, torch.ones(num_tokens, NUM_SHARED)], dim=1)
    return x, shares, torch.cat([chosen, shared], dim=1).int()


def of_rank(whole: Tensor, rank: int) -> Tensor:
    """Return the rank's rows, padded with arbitrary numbers."""
    rows = rows_a_rank(whole.shape[0], SIZE)
    own = whole[rank * rows : (rank + 1) * rows]
    return torch.cat([own, torch.ones(rows - own.shape[0], *whole.shape[1:], dtype=whole.dtype)])


def factor(expert: Tensor) -> Tensor:
    """Return the factor by which an expert multiplies x; shared experts have the same one on each rank."""
    return 1 + expert.float()


def parts_of(x: Tensor, shares: Tensor, chosen: Tensor, rank: int) -> Tensor:
    """Return (choices, slots, hidden), as grouped GEMMs do; NaN where a choice is another rank's."""
    experts = torch.where(chosen < HELD, chosen + rank * HELD, chosen - HELD + SIZE * HELD)
    parts = x.float() * (shares * factor(experts)).t()[..., None]
    return torch.where((chosen >= 0).t()[..., None], parts, float("nan")).bfloat16().contiguous()


def run_rank(folder: Path, rank: int) -> None:
    mapped = map_files(folder, "exchange", SIZE, LAYOUT.num_bytes)
    addresses = torch.tensor([each.data_ptr() for each in mapped])
    memory = ExchangeMemory.over(LAYOUT, rank, addresses, mapped[rank], counts=True)
    assert memory.moved is not None
    found = []
    for step, (tokens, form) in enumerate(STEPS):
        x, shares, chosen = (of_rank(each, rank) for each in inputs(step, tokens))
        memory.moved.zero_()
        came = dispatch(x, shares, chosen, tokens, HELD, memory, is_padded=form == "padded", lists=form == "grouped")
        received = came.x.clone()  # after combine, a peer may send the next ones
        if came.pairs is not None:
            expected = sort_pairs(came.chosen, HELD + NUM_SHARED)
            assert torch.equal(came.pairs.counts, expected.counts)
            num_pairs = int(expected.counts.sum())
            assert torch.equal(came.pairs.order[:num_pairs], expected.order[:num_pairs])
        if form == "grouped":
            parts = parts_of(came.x, came.shares, came.chosen, rank)
            out = combine(parts, came, memory)
        else:
            all_shares, every = choose_all(came.shares, came.chosen, range(HELD + NUM_SHARED))
            parts = parts_of(came.x.nan_to_num(), all_shares, every, rank)
            out = combine(parts, came, memory, every, is_padded=form == "padded")
        assert not out[own_rows(tokens, memory) :].any()
        found.append((received, came.chosen, came.shares, out[: own_rows(tokens, memory)], memory.moved.tolist()))
    torch.save(found, folder / f"found{rank}.pt")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's processes share files")
def test_rows_go_to_their_experts_and_sums_come_back(tmp_path: Path) -> None:
    make_files(tmp_path, "exchange", SIZE, LAYOUT.num_bytes)
    run_ranks(run_rank, tmp_path, SIZE)
    found = [torch.load(tmp_path / f"found{rank}.pt") for rank in range(SIZE)]
    for step, (tokens, form) in enumerate(STEPS):
        x, shares, chosen = inputs(step, tokens)
        sums = torch.cat([each[step][3] for each in found])
        expected = ((shares * factor(chosen)).sum(dim=1, keepdim=True) * x.float()).bfloat16()
        torch.testing.assert_close(sums, expected, rtol=3e-2, atol=3e-2)
        rows, routed = rows_a_rank(tokens, SIZE), chosen[:, :TOP_K]
        for rank in range(SIZE):
            came, choices, weights, _, moved = found[rank][step]
            origin = torch.arange(tokens) // rows
            is_mine = routed // HELD == rank
            assert torch.equal(choices[:tokens, :TOP_K], torch.where(is_mine, routed - rank * HELD, -1))
            assert (choices[tokens:] == -1).all()
            assert ((choices[:tokens, TOP_K] == HELD) == (origin == rank)).all()
            assert torch.equal(weights[:tokens, :TOP_K][is_mine], shares[:, :TOP_K][is_mine])
            assert torch.equal(came[:tokens][is_mine.any(dim=1)], x[is_mine.any(dim=1)])
            of_ranks = [routed[first : first + rows] for first in range(0, SIZE * rows, rows)]
            need = ideal_bytes(of_ranks, rank, SIZE * HELD, row_bytes=1)
            own = of_ranks[rank].shape[0]
            if form == "padded":
                assert moved == [own * (SIZE - 1), tokens - own]
            else:
                assert moved == [need.dispatched // (1 + 8 * TOP_K), need.combined]


def test_what_does_not_fit_is_refused() -> None:
    own = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
    memory = ExchangeMemory.over(LAYOUT, 0, torch.zeros(SIZE, dtype=torch.int64), own, counts=False)
    x, shares, chosen = inputs(0, 4)
    with pytest.raises(ValueError, match="not a rank's part"):
        dispatch(x, shares, chosen, 4, HELD, memory)
    with pytest.raises(ValueError, match="do not fit"):
        dispatch(x[:2].float(), shares[:2], chosen[:2], 4, HELD, memory)
    with pytest.raises(ValueError, match="contiguous"):
        dispatch(x[:2], shares[:2], chosen.t().contiguous().t()[:2], 4, HELD, memory)
