"""Pairs of a token and one of its experts, listed by expert, so that grouped GEMMs find an expert's rows together.

Pair t * top_k + j is token t and its j-th expert. A program per expert counts the pairs of the experts before it,
then lists its own pairs in order. Without atomics, the order is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import overlaps_launches, wait_for_predecessor

SORT_BLOCK = 4096  # pairs that a sorting program reads at a time
LARGE_SORT_BLOCK, MANY_PAIRS = 16384, 65536  # the same from MANY_PAIRS pairs on
LEAST_TOKENS = 32  # fewer use the variant for this many, which is compiled beforehand, since such steps are captured


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """order: pairs by expert, int32 (num_pairs,), without other ranks'. counts: per expert, (num_experts,)."""

    order: Tensor
    counts: Tensor


@triton.jit
def list_pairs(chosen_ptr, order_ptr, counts_ptr, num_pairs, expert, BLOCK: tl.constexpr, CACHE: tl.constexpr):
    """Count the pairs of earlier experts, then list this expert's. CACHE: a modifier of loads."""
    num_before = 0
    num_mine = 0
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        theirs = tl.load(chosen_ptr + pairs, mask=pairs < num_pairs, other=2147483647, cache_modifier=CACHE)
        num_before += tl.sum(((theirs >= 0) & (theirs < expert)).to(tl.int32))
        num_mine += tl.sum((theirs == expert).to(tl.int32))
    tl.store(counts_ptr + expert, num_mine)
    place = num_before
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        theirs = tl.load(chosen_ptr + pairs, mask=pairs < num_pairs, other=2147483647, cache_modifier=CACHE)
        is_mine = (theirs == expert).to(tl.int32)
        before = tl.cumsum(is_mine, axis=0) - is_mine
        tl.store(order_ptr + place + before, pairs, mask=is_mine == 1)
        place += tl.sum(is_mine)


@triton.jit(do_not_specialize_on_alignment=["num_pairs"])
def _sort_kernel(
    chosen_ptr, order_ptr, counts_ptr, num_pairs, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per expert."""
    expert = tl.program_id(0)
    wait_for_predecessor(OVERLAPS)
    list_pairs(chosen_ptr, order_ptr, counts_ptr, num_pairs, expert, BLOCK, "")


def sort_block(num_pairs: int) -> int:
    """Return the pairs that a program reads at a time."""
    block: int = min(SORT_BLOCK, triton.next_power_of_2(num_pairs))
    return block


def sort_pairs(chosen: Tensor, num_experts: int) -> SortedPairs:
    """Sort chosen int32 (num_tokens, top_k), contiguous; -1: an expert of another rank. Stable within an expert."""
    num_pairs = chosen.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=chosen.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    overlaps = overlaps_launches(chosen)
    block = sort_block(max(chosen.shape[0], LEAST_TOKENS) * chosen.shape[1])
    num_warps = 8 if block == SORT_BLOCK else 4
    if num_pairs >= MANY_PAIRS:
        block, num_warps = LARGE_SORT_BLOCK, 16
    _sort_kernel[(num_experts,)](
        chosen,
        order,
        counts,
        num_pairs,
        BLOCK=block,
        OVERLAPS=overlaps,
        num_warps=num_warps,
        launch_pdl=overlaps,
    )
    return SortedPairs(order, counts)
