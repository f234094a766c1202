"""Combine: ranks return partial sums of the rows that were dispatched to them.

    out[t] = sum over ranks of their partial sums of this rank's row t

One kernel over `kernels/gpu/expert_parallel/exchange_memory.py`: a program returns one row of each other rank, and
sums up the partial sums returned for this rank's row. Reference: `engine/expert_parallel/exchange.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.rms_norm import num_warps_for
from kernels.gpu.expert_parallel.exchange_memory import (
    COMBINE,
    ExchangeLayout,
    ExchangeMemory,
    memory_of,
    num_peers,
    of_rank,
    raise_flags,
    take_row,
)
from kernels.gpu.expert_parallel.expert_dispatch import Dispatched
from kernels.gpu.launch import is_compiled, overlaps_launches, wait_for_predecessor


@triton.jit
def _partial_sum(
    parts_ptr, part_chosen_ptr, slot, num_slots, columns, n, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum up the outputs of this rank's experts for a row, float32."""
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(NUM_PARTS):
        is_held = tl.load(part_chosen_ptr + slot * NUM_PARTS + j) >= 0
        at = parts_ptr + (j * num_slots + slot) * n + columns
        total += tl.load(at, mask=(columns < n) & is_held, other=0.0).to(tl.float32)
    return total


@triton.jit
def _comes_back(
    chosen_ptr, row, num_rows, num_tokens, SIZE: tl.constexpr, RANKS: tl.constexpr, CHOICES: tl.constexpr,
    PADDED: tl.constexpr, IS_PADDED: tl.constexpr,
):  # fmt: skip
    """Return, for each of RANKS, whether it has sent the row."""
    peers, ks = tl.arange(0, RANKS), tl.arange(0, PADDED)
    slots = peers * num_rows + row
    is_there = (peers < SIZE)[:, None] & (ks < CHOICES)[None, :]
    chosen = tl.load(chosen_ptr + slots[:, None] * CHOICES + ks[None, :], mask=is_there, other=-1)
    comes = tl.max(chosen, axis=1) >= 0
    if IS_PADDED:
        comes = slots < num_tokens
    return comes


@triton.jit
def combine_row(
    parts_ptr, part_chosen_ptr, chosen_ptr, moved_ptr, addresses_ptr, epochs_ptr, row, num_rows, num_tokens, n,
    max_rows, inbox_at, RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr, NUM_PARTS: tl.constexpr,
    CHOICES: tl.constexpr, PADDED: tl.constexpr, IS_PADDED: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Return this row of the other ranks, and sum up the partial sums of this rank's: float32 (BLOCK,)."""
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    dtype = parts_ptr.dtype.element_ty
    epoch = tl.load(epochs_ptr + COMBINE * max_rows + row) + 1
    comes = _comes_back(
        chosen_ptr, row, num_rows, num_tokens, SIZE, RANKS, CHOICES, PADDED, IS_PADDED
    )  # fmt: skip
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            slot = peer * num_rows + row
            part = _partial_sum(parts_ptr, part_chosen_ptr, slot, SIZE * num_rows, columns, n, NUM_PARTS, BLOCK)
            inbox = memory_of(addresses_ptr, peer, inbox_at, dtype)
            tl.store(
                inbox + (RANK * max_rows + row) * n + columns,
                part.to(dtype),
                mask=inside & of_rank(comes, peer, RANKS),
            )
    tl.debug_barrier()  # all threads have written
    raise_flags(addresses_ptr, row, max_rows, epoch, comes, COMBINE, RANK, SIZE, RANKS)
    slot = RANK * num_rows + row
    total = _partial_sum(parts_ptr, part_chosen_ptr, slot, SIZE * num_rows, columns, n, NUM_PARTS, BLOCK)
    for sender in tl.static_range(SIZE):
        if sender != RANK:
            part = take_row(
                addresses_ptr, sender, row, columns, inside, n, max_rows, inbox_at, epoch, dtype, COMBINE, RANK,
                SIZE, COMPILED,
            )  # fmt: skip
            total += part.to(tl.float32)
    tl.store(epochs_ptr + COMBINE * max_rows + row, epoch)
    if COUNTS:
        tl.atomic_add(moved_ptr + COMBINE, num_peers(comes, RANK, SIZE, RANKS), sem="relaxed")
    return total


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _combine_kernel(
    parts_ptr, part_chosen_ptr, chosen_ptr, out_ptr, moved_ptr, addresses_ptr, epochs_ptr, num_rows, num_tokens, n,
    max_rows, inbox_at, RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr, NUM_PARTS: tl.constexpr,
    CHOICES: tl.constexpr, PADDED: tl.constexpr, IS_PADDED: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """One program per row of a rank."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wait_for_predecessor(OVERLAPS)
    total = combine_row(
        parts_ptr, part_chosen_ptr, chosen_ptr, moved_ptr, addresses_ptr, epochs_ptr, row, num_rows, num_tokens, n,
        max_rows, inbox_at, RANK, SIZE, RANKS, NUM_PARTS, CHOICES, PADDED, IS_PADDED, COUNTS, BLOCK, COMPILED,
    )  # fmt: skip
    tl.store(out_ptr + row * n + columns, total.to(out_ptr.dtype.element_ty), mask=columns < n)


def check_parts(parts: Tensor, part_chosen: Tensor, dispatched: Dispatched, layout: ExchangeLayout) -> None:
    """Raise ValueError for arguments that the kernels do not support, see `combine`."""
    num_parts, total, n = parts.shape
    if part_chosen.shape != (total, num_parts) or total != dispatched.x.shape[0] or n != layout.width:
        raise ValueError(f"{list(parts.shape)} parts are not of {list(dispatched.x.shape)} rows")
    if not (parts.is_contiguous() and part_chosen.is_contiguous()) or parts.dtype != layout.dtype:
        raise ValueError(f"parts and their experts must be contiguous, parts {layout.dtype}")


def combine(
    parts: Tensor, dispatched: Dispatched, memory: ExchangeMemory, part_chosen: Tensor | None = None,
    is_padded: bool = False,
) -> Tensor:  # fmt: skip
    """Return this rank's rows (rows, hidden), summed over all experts; zeros for missing rows.

    parts: (num_parts, size * rows, hidden), outputs of this rank's experts for received rows. part_chosen: int32
    (size * rows, num_parts), the expert of each part, by default the chosen ones; parts of -1 are left out.
    """
    layout, (num_parts, total, n) = memory.layout, parts.shape
    if part_chosen is None:
        part_chosen = dispatched.chosen
    check_parts(parts, part_chosen, dispatched, layout)
    rows, num_choices = total // layout.size, dispatched.chosen.shape[1]
    out = torch.empty(rows, n, dtype=parts.dtype, device=parts.device)
    overlaps = overlaps_launches(parts)
    _combine_kernel[(rows,)](
        parts, part_chosen, dispatched.chosen, out, memory.epochs if memory.moved is None else memory.moved,
        memory.addresses, memory.epochs, rows, dispatched.num_tokens, n, layout.max_rows,
        layout.inbox_at(COMBINE.value), RANK=memory.rank, SIZE=layout.size,
        RANKS=triton.next_power_of_2(layout.size), NUM_PARTS=num_parts, CHOICES=num_choices,
        PADDED=triton.next_power_of_2(num_choices), IS_PADDED=is_padded, COUNTS=memory.moved is not None,
        BLOCK=triton.next_power_of_2(n), OVERLAPS=overlaps, COMPILED=is_compiled(parts),
        num_warps=16 if n > 4096 else num_warps_for(n), launch_pdl=overlaps,
    )  # fmt: skip
    return out
