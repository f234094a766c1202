"""Kernels between the blocks of ranks that divide rows: sum of outputs, residual, RMS norm, all-gather.

    scatter or combine   y[t] = sum over ranks of their shares of this rank's row t, or of its experts' partial sums
    add, norm            residual[t] += y[t];  x[t] = rms_norm(residual[t]) * weight
    gather               x of all ranks' rows, for a block that needs them

One kernel over `kernels/gpu/expert_parallel/exchange_memory.py`, with a program per row of each rank. A rank sends a
row once to each rank that needs it, as much as a ring would move, so the kernel is for any number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.rms_norm import num_warps_for
from kernels.gpu.expert_parallel.exchange_memory import (
    COMBINE,
    GATHER,
    SCATTER,
    ExchangeMemory,
    memory_of,
    own_rows,
    raise_flags,
    rows_a_rank,
    take_row,
)
from kernels.gpu.expert_parallel.expert_combine import check_parts, combine_row
from kernels.gpu.expert_parallel.expert_dispatch import Dispatched
from kernels.gpu.launch import is_compiled, overlaps_launches, wait_for_predecessor


@triton.jit
def _scatter_row(
    pending_ptr, addresses_ptr, epochs_ptr, row, num_rows, num_tokens, n, max_rows, inbox_at, RANK: tl.constexpr,
    SIZE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Send this row of the other ranks to them, and sum up this rank's: float32 (BLOCK,)."""
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    dtype = pending_ptr.dtype.element_ty
    epoch = tl.load(epochs_ptr + SCATTER * max_rows + row) + 1
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = peer * num_rows + row
            part = tl.load(pending_ptr + theirs * n + columns, mask=inside & (theirs < num_tokens), other=0.0)
            inbox = memory_of(addresses_ptr, peer, inbox_at, dtype)
            at = inbox + (RANK * max_rows + row) * n + columns
            tl.store(at, part, mask=inside & (theirs < num_tokens))
    tl.debug_barrier()  # all threads have written
    exist = tl.arange(0, RANKS) * num_rows + row < num_tokens
    raise_flags(addresses_ptr, row, max_rows, epoch, exist, SCATTER, RANK, SIZE, RANKS)
    mine = RANK * num_rows + row
    own = tl.load(pending_ptr + mine * n + columns, mask=inside & (mine < num_tokens), other=0.0)
    total = own.to(tl.float32)
    for sender in tl.static_range(SIZE):
        if sender != RANK:
            part = take_row(
                addresses_ptr, sender, row, columns, inside, n, max_rows, inbox_at, epoch, dtype, SCATTER, RANK, SIZE,
                COMPILED,
            )  # fmt: skip
            total += part.to(tl.float32)
    tl.store(epochs_ptr + SCATTER * max_rows + row, epoch)
    return total


@triton.jit
def _gather_row(
    x, out_ptr, addresses_ptr, epochs_ptr, row, num_rows, num_tokens, n, max_rows, inbox_at, RANK: tl.constexpr,
    SIZE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Send this rank's row x (BLOCK,) to all others, and store this row of all ranks."""
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    epoch = tl.load(epochs_ptr + GATHER * max_rows + row) + 1
    mine = RANK * num_rows + row
    exists = inside & (mine < num_tokens)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            inbox = memory_of(addresses_ptr, peer, inbox_at, x.dtype)
            tl.store(inbox + (RANK * max_rows + row) * n + columns, x, mask=exists)
    tl.debug_barrier()  # all threads have written
    exist = (tl.arange(0, RANKS) >= 0) & (mine < num_tokens)
    raise_flags(addresses_ptr, row, max_rows, epoch, exist, GATHER, RANK, SIZE, RANKS)
    tl.store(out_ptr + mine * n + columns, x, mask=exists)
    for sender in tl.static_range(SIZE):
        if sender != RANK:
            part = take_row(
                addresses_ptr, sender, row, columns, inside, n, max_rows, inbox_at, epoch, x.dtype, GATHER, RANK,
                SIZE, COMPILED,
            )  # fmt: skip
            theirs = sender * num_rows + row
            tl.store(out_ptr + theirs * n + columns, part, mask=inside & (theirs < num_tokens))
    tl.store(epochs_ptr + GATHER * max_rows + row, epoch)


@triton.jit(do_not_specialize=["num_rows", "num_own", "num_tokens"])
def _divided_norm_kernel(
    pending_ptr, part_chosen_ptr, chosen_ptr, residual_ptr, weight_ptr, out_ptr, moved_ptr, addresses_ptr, epochs_ptr,
    num_rows, num_own, num_tokens, n, max_rows, combine_at, scatter_at, gather_at, eps, RANK: tl.constexpr,
    SIZE: tl.constexpr, RANKS: tl.constexpr, NUM_PARTS: tl.constexpr, CHOICES: tl.constexpr, PADDED: tl.constexpr,
    GATHERS: tl.constexpr,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """NUM_PARTS: partial sums of experts; 0: pending is this rank's share of a sum."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(OVERLAPS)
    if NUM_PARTS > 0:
        total = combine_row(
            pending_ptr, part_chosen_ptr, chosen_ptr, moved_ptr, addresses_ptr, epochs_ptr, row, num_rows, num_tokens,
            n, max_rows, combine_at, RANK, SIZE, RANKS, NUM_PARTS, CHOICES, PADDED, False, COUNTS, BLOCK, COMPILED,
        )  # fmt: skip
    else:
        total = _scatter_row(
            pending_ptr, addresses_ptr, epochs_ptr, row, num_rows, num_tokens, n, max_rows, scatter_at, RANK, SIZE,
            RANKS, BLOCK, COMPILED,
        )  # fmt: skip
    residual = tl.load(residual_ptr + row * n + columns, mask=inside & (row < num_own), other=0.0)
    rounded = (residual.to(tl.float32) + total).to(residual.dtype)
    tl.store(residual_ptr + row * n + columns, rounded, mask=inside & (row < num_own))
    value = rounded.to(tl.float32)
    value = (value * tl.rsqrt(tl.sum(value * value, axis=0) / n + eps) * weight).to(residual.dtype)
    if GATHERS:
        _gather_row(
            value, out_ptr, addresses_ptr, epochs_ptr, row, num_rows, num_tokens, n, max_rows, gather_at, RANK, SIZE,
            RANKS, BLOCK, COMPILED,
        )  # fmt: skip
    else:
        tl.store(out_ptr + row * n + columns, value, mask=inside)


def scatter_add_rms_norm(
    pending: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: ExchangeMemory, gathers: bool
) -> Tensor:
    """Add this rank's rows of the sum of all ranks' pending (num_tokens, n) to residual (rows, n), and norm it.

    rows: ceil(num_tokens / size); the last ranks may have fewer. Returns the norm of this rank's rows (rows, n),
    zeros for missing rows, or with `gathers` of all rows (num_tokens, n).
    """
    return _add_norm(pending, pending.shape[0], None, residual, weight, eps, memory, gathers)


def combine_add_rms_norm(
    parts: Tensor, dispatched: Dispatched, residual: Tensor, weight: Tensor, eps: float, memory: ExchangeMemory,
    gathers: bool,
) -> Tensor:  # fmt: skip
    """Compute `scatter_add_rms_norm` for the result of `combine`."""
    check_parts(parts, dispatched.chosen, dispatched, memory.layout)
    return _add_norm(parts, dispatched.num_tokens, dispatched.chosen, residual, weight, eps, memory, gathers)


def _add_norm(
    pending: Tensor, num_tokens: int, chosen: Tensor | None, residual: Tensor, weight: Tensor, eps: float,
    memory: ExchangeMemory, gathers: bool,
) -> Tensor:  # fmt: skip
    layout, (rows, n) = memory.layout, residual.shape
    if rows != rows_a_rank(num_tokens, layout.size) or rows > layout.max_rows or n != layout.width:
        raise ValueError(f"a residual of {list(residual.shape)} is not a rank's part of {num_tokens} in {layout}")
    if pending.dtype != layout.dtype or residual.dtype != layout.dtype:
        raise ValueError(f"outputs and residual must be {layout.dtype}")
    if not (pending.is_contiguous() and residual.is_contiguous()):
        raise ValueError("outputs and residual must be contiguous")
    out = torch.empty(num_tokens if gathers else rows, n, dtype=residual.dtype, device=residual.device)
    num_parts = 0 if chosen is None else pending.shape[0]
    indices = pending if chosen is None else chosen
    overlaps = overlaps_launches(residual)
    _divided_norm_kernel[(rows,)](
        pending, indices, indices, residual, weight, out, memory.epochs if memory.moved is None else memory.moved,
        memory.addresses, memory.epochs, rows, own_rows(num_tokens, memory), num_tokens, n, layout.max_rows,
        layout.inbox_at(COMBINE.value), layout.inbox_at(SCATTER.value), layout.inbox_at(GATHER.value), eps,
        RANK=memory.rank, SIZE=layout.size, RANKS=triton.next_power_of_2(layout.size), NUM_PARTS=num_parts,
        CHOICES=num_parts,
        PADDED=triton.next_power_of_2(max(num_parts, 1)), GATHERS=gathers, COUNTS=memory.moved is not None,
        BLOCK=triton.next_power_of_2(n), OVERLAPS=overlaps, COMPILED=is_compiled(residual),
        num_warps=16 if n > 4096 else num_warps_for(n), launch_pdl=overlaps,
    )  # fmt: skip
    return out
