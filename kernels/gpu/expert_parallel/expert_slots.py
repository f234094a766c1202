"""Maps chosen experts to slots if experts have replicas: `engine/expert_parallel/slots.py` in a kernel.

    chosen[t, j] = table[e, t mod counts[e]] - first held, of e = chosen[t, j]; another rank's: -1

Runs after `route`, only for layers with a placement. Reference: `ExpertSlots.choose`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import overlaps_launches, wait_for_predecessor

BLOCK = 256  # choices per program


@triton.jit(do_not_specialize=["num_pairs"])
def _choose_slots_kernel(
    chosen_ptr, table_ptr, counts_ptr, num_pairs, first_held, num_experts, most, num_held, CHOICES: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    pairs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_pair = pairs < num_pairs
    wait_for_predecessor(OVERLAPS)
    experts = tl.load(chosen_ptr + pairs, mask=is_pair, other=0)
    is_routed = is_pair & (experts < num_experts)
    counts = tl.load(counts_ptr + experts, mask=is_routed, other=1)
    turns = (pairs // CHOICES) % counts
    slots = tl.load(table_ptr + experts * most + turns, mask=is_routed, other=0) - first_held
    slots = tl.where((slots >= 0) & (slots < num_held), slots, -1)
    slots = tl.where(is_routed, slots, num_held + experts - num_experts)
    tl.store(chosen_ptr + pairs, slots.to(tl.int32), mask=is_pair)


def choose_slots(chosen: Tensor, table: Tensor, counts: Tensor, held: range) -> None:
    """Replace experts by slots in place, counted from the first held. chosen: int32 (num_tokens, choices), of all
    experts, followed by shared ones, which come after the held slots. table, counts: int64, see `ExpertSlots`.
    """
    if chosen.dtype != torch.int32 or not chosen.is_contiguous():
        raise ValueError("chosen must be contiguous int32")
    num_pairs = chosen.numel()
    overlaps = overlaps_launches(chosen)
    _choose_slots_kernel[(triton.cdiv(num_pairs, BLOCK),)](
        chosen, table, counts, num_pairs, held.start, table.shape[0], table.shape[1], len(held),
        CHOICES=chosen.shape[1], BLOCK=BLOCK, OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps,
    )  # fmt: skip
