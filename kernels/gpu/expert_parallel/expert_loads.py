"""Counts of the tokens that choose each expert, after `route`, if they are asked for.

    loads[e] += number of (t, j) with chosen[t, j] = e and slots[t] >= 0

Rows without a slot in the KV pool are a graph's padding. Reference: `Moe.route`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import overlaps_launches, wait_for_predecessor

BLOCK = 256  # choices per program


@triton.jit(do_not_specialize=["num_pairs"])
def _count_choices_kernel(
    chosen_ptr, slots_ptr, loads_ptr, num_pairs, num_experts, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    pairs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_pair = pairs < num_pairs
    wait_for_predecessor(OVERLAPS)
    experts = tl.load(chosen_ptr + pairs, mask=is_pair, other=0)
    slots = tl.load(slots_ptr + pairs // CHOICES, mask=is_pair, other=-1)
    counts = is_pair & (slots >= 0) & (experts < num_experts)
    tl.atomic_add(loads_ptr + experts, tl.full((BLOCK,), 1, tl.int64), mask=counts, sem="relaxed")


def count_choices(chosen: Tensor, slots: Tensor, loads: Tensor) -> None:
    """Add the choices of rows with a slot to loads, int64 (num_experts,).

    chosen: int32 (num_tokens, choices), of all experts; shared ones follow them and are not counted. slots: int32
    (num_tokens or more,).
    """
    if chosen.dtype != torch.int32 or not chosen.is_contiguous() or loads.dtype != torch.int64:
        raise ValueError("chosen must be contiguous int32, and loads int64")
    num_pairs = chosen.numel()
    overlaps = overlaps_launches(chosen)
    _count_choices_kernel[(triton.cdiv(num_pairs, BLOCK),)](
        chosen, slots, loads, num_pairs, loads.shape[0],
        CHOICES=chosen.shape[1], BLOCK=BLOCK, OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps,
    )  # fmt: skip
