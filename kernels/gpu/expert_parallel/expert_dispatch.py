"""Dispatch: rows of hidden states go to the ranks that have their experts.

    received[s, t] = x[t] of rank s, for each row t that chose one of this rank's experts

One kernel over `kernels/gpu/expert_parallel/exchange_memory.py`: a program sends one row to all ranks with one of its
experts, once to each, and receives this row of all ranks. GEMMs read rows where they were received. More programs,
one per expert, may list the pairs of rows and experts by expert once all rows have arrived, so that grouped GEMMs can
start. Shapes depend only on the step's number of rows, so a step can be captured.

`kernels/gpu/expert_parallel/expert_combine.py` is the way back. Reference: `engine/expert_parallel/exchange.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.rms_norm import num_warps_for
from kernels.gpu.expert_parallel.exchange_memory import (
    DISPATCH,
    ExchangeMemory,
    flag_of,
    memory_of,
    num_peers,
    of_rank,
    own_rows,
    raise_flags,
    rows_a_rank,
    wait_for_flag,
)
from kernels.gpu.launch import is_compiled, overlaps_launches, wait_for_predecessor
from kernels.gpu.moe.expert_pairs import SORT_BLOCK, SortedPairs, list_pairs, sort_block


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows received for this rank's experts; row t of rank s is at s * rows + t, with `rows` per rank.

    x: (size * rows, hidden), valid until combined; undefined where nothing was sent. shares: float32, chosen: int32,
    (size * rows, choices); experts are counted from the rank's first, -1: another rank's. pairs: by expert.
    num_tokens: of all ranks.
    """

    x: Tensor
    shares: Tensor
    chosen: Tensor
    pairs: SortedPairs | None
    num_tokens: int


@triton.jit
def _chosen_of(choices, rank, HELD: tl.constexpr):
    """Return choices as experts counted from the rank's first, -1 for others."""
    theirs = choices - rank * HELD
    return tl.where((choices >= 0) & (theirs >= 0) & (theirs < HELD), theirs, -1)


@triton.jit
def _dispatch_row(
    x_ptr, shares_ptr, chosen_ptr, out_shares_ptr, out_chosen_ptr, moved_ptr, addresses_ptr, epochs_ptr, row,
    num_rows, num_own, n, max_rows, choices_at, received_at, RANK: tl.constexpr, SIZE: tl.constexpr,
    RANKS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, PADDED: tl.constexpr, HELD: tl.constexpr,
    IS_PADDED: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    columns, ks = tl.arange(0, BLOCK), tl.arange(0, PADDED)
    exists = row < num_own
    epoch = tl.load(epochs_ptr + DISPATCH * max_rows + row) + 1
    is_choice = ks < TOP_K
    choices = tl.load(chosen_ptr + row * CHOICES + ks, mask=(ks < CHOICES) & exists, other=-1)
    shares = tl.load(shares_ptr + row * CHOICES + ks, mask=(ks < CHOICES) & exists, other=0.0)
    routed = tl.where(is_choice, choices, -1)  # without shared experts
    x = tl.load(x_ptr + row * n + columns, mask=(columns < n) & exists, other=0.0)
    of_ranks = _chosen_of(routed[:, None], tl.arange(0, RANKS)[None, :], HELD)
    goes = exists & ((tl.max(of_ranks, axis=0) >= 0) | IS_PADDED)
    slot = RANK * num_rows + row
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            goes_there = of_rank(goes, peer, RANKS)
            rows = memory_of(addresses_ptr, peer, received_at, x.dtype)
            tl.store(rows + slot * n + columns, x, mask=(columns < n) & goes_there)
            packed = memory_of(addresses_ptr, peer, choices_at, tl.int32) + slot * (2 * TOP_K)
            tl.store(packed + ks, _chosen_of(routed, peer, HELD), mask=is_choice & goes_there)
            bits = shares.to(tl.int32, bitcast=True)
            tl.store(packed + TOP_K + ks, bits, mask=is_choice & goes_there)
    tl.debug_barrier()  # all threads have written
    raise_flags(addresses_ptr, row, max_rows, epoch, goes, DISPATCH, RANK, SIZE, RANKS)
    mine = _chosen_of(routed, RANK, HELD)
    mine = tl.where(is_choice | (choices < 0), mine, HELD + ks - TOP_K)
    own_rows = memory_of(addresses_ptr, RANK, received_at, x.dtype)
    tl.store(own_rows + slot * n + columns, x, mask=(columns < n) & exists)
    tl.store(out_chosen_ptr + slot * CHOICES + ks, mine, mask=ks < CHOICES)
    tl.store(out_shares_ptr + slot * CHOICES + ks, shares, mask=ks < CHOICES)
    own_choices = memory_of(addresses_ptr, RANK, choices_at, tl.int32)
    for sender in tl.static_range(SIZE):
        if sender != RANK:
            flag = flag_of(addresses_ptr, RANK, sender, row, max_rows, DISPATCH, SIZE)
            came = (wait_for_flag(flag, 2 * epoch, COMPILED) & 1) == 1
            slot = sender * num_rows + row
            at = own_choices + slot * (2 * TOP_K) + ks
            theirs = tl.load(at, mask=is_choice & came, other=-1, cache_modifier=".cv")
            bits = tl.load(at + TOP_K, mask=is_choice & came, other=0, cache_modifier=".cv")
            tl.store(out_chosen_ptr + slot * CHOICES + ks, theirs, mask=ks < CHOICES)
            tl.store(out_shares_ptr + slot * CHOICES + ks, bits.to(tl.float32, bitcast=True), mask=ks < CHOICES)
    tl.store(epochs_ptr + DISPATCH * max_rows + row, epoch)
    if COUNTS:
        tl.atomic_add(moved_ptr + DISPATCH, num_peers(goes, RANK, SIZE, RANKS), sem="relaxed")


@triton.jit
def _list_expert(
    chosen_ptr, order_ptr, counts_ptr, arrived_ptr, num_rows, num_pairs, expert, NUM_LISTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """List an expert's pairs once all programs of rows are done, which come first and do not wait for this one."""
    while tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu") < num_rows:
        pass
    list_pairs(chosen_ptr, order_ptr, counts_ptr, num_pairs, expert, BLOCK, ".cg")
    if tl.atomic_add(arrived_ptr + 1, 1, sem="acq_rel", scope="gpu") == NUM_LISTS - 1:  # all others have seen it
        tl.store(arrived_ptr, 0)
        tl.store(arrived_ptr + 1, 0)


@triton.jit(do_not_specialize=["num_rows", "num_own"])
def _dispatch_kernel(
    x_ptr, shares_ptr, chosen_ptr, out_shares_ptr, out_chosen_ptr, order_ptr, counts_ptr, arrived_ptr, moved_ptr,
    addresses_ptr, epochs_ptr, num_rows, num_own, n, max_rows, choices_at, received_at, RANK: tl.constexpr,
    SIZE: tl.constexpr, RANKS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, PADDED: tl.constexpr,
    HELD: tl.constexpr, IS_PADDED: tl.constexpr, LISTS: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """One program per row of a rank, then with LISTS one per expert."""
    program = tl.program_id(0).to(tl.int64)
    wait_for_predecessor(OVERLAPS)
    if program < num_rows:
        _dispatch_row(
            x_ptr, shares_ptr, chosen_ptr, out_shares_ptr, out_chosen_ptr, moved_ptr, addresses_ptr, epochs_ptr,
            program, num_rows, num_own, n, max_rows, choices_at, received_at, RANK, SIZE, RANKS, TOP_K, CHOICES,
            PADDED,
            HELD, IS_PADDED, COUNTS, BLOCK, COMPILED,
        )  # fmt: skip
        if LISTS:
            tl.debug_barrier()
            tl.atomic_add(arrived_ptr, 1, sem="release", scope="gpu")
    elif LISTS:
        _list_expert(
            out_chosen_ptr, order_ptr, counts_ptr, arrived_ptr, num_rows, SIZE * num_rows * CHOICES,
            program - num_rows, HELD + CHOICES - TOP_K, PAIRS,
        )  # fmt: skip


def dispatch(
    x: Tensor, shares: Tensor, chosen: Tensor, num_tokens: int, num_held: int, memory: ExchangeMemory,
    is_padded: bool = False, lists: bool = True,
) -> Dispatched:  # fmt: skip
    """Send this rank's rows to their experts' ranks, and receive those for its own experts.

    x: (rows, hidden), shares: float32 and chosen: int32 (rows, choices), contiguous, of ceil(num_tokens / size) rows;
    the last ranks may have fewer. The first top_k choices are experts of all ranks, num_held each; later choices are
    experts that every rank has. is_padded: rows go to all ranks. lists: list pairs by expert.
    """
    layout, (rows, n), num_choices = memory.layout, x.shape, chosen.shape[1]
    if rows != rows_a_rank(num_tokens, layout.size):
        raise ValueError(f"{rows} rows are not a rank's part of {num_tokens}")
    if rows > layout.max_rows or n != layout.width or x.dtype != layout.dtype or num_choices < layout.top_k:
        raise ValueError(f"{list(x.shape)} {x.dtype}, {num_choices} choices do not fit {layout}")
    if not (x.is_contiguous() and shares.is_contiguous() and chosen.is_contiguous()):
        raise ValueError("x, shares and choices must be contiguous")
    total, num_lists = layout.size * rows, num_held + num_choices - layout.top_k
    out_shares = torch.empty(total, num_choices, dtype=torch.float32, device=x.device)
    out_chosen = torch.empty(total, num_choices, dtype=torch.int32, device=x.device)
    pairs = None
    if lists:
        order = torch.empty(total * num_choices, dtype=torch.int32, device=x.device)
        pairs = SortedPairs(order, torch.empty(num_lists, dtype=torch.int32, device=x.device))
    overlaps, pairs_block = overlaps_launches(x), sort_block(total * num_choices)
    num_warps = 8 if lists and pairs_block == SORT_BLOCK else num_warps_for(n)
    _dispatch_kernel[(rows + (num_lists if lists else 0),)](
        x, shares, chosen, out_shares, out_chosen, pairs.order if pairs else out_chosen,
        pairs.counts if pairs else out_chosen, memory.arrived,
        memory.epochs if memory.moved is None else memory.moved, memory.addresses, memory.epochs, rows,
        own_rows(num_tokens, memory), n, layout.max_rows, layout.choices_at, layout.received_at, RANK=memory.rank,
        SIZE=layout.size, RANKS=triton.next_power_of_2(layout.size), TOP_K=layout.top_k, CHOICES=num_choices,
        PADDED=triton.next_power_of_2(num_choices),
        HELD=num_held, IS_PADDED=is_padded, LISTS=lists, COUNTS=memory.moved is not None,
        BLOCK=triton.next_power_of_2(n), PAIRS=pairs_block, OVERLAPS=overlaps,
        COMPILED=is_compiled(x), num_warps=num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return Dispatched(memory.received(rows), out_shares, out_chosen, pairs, num_tokens)
