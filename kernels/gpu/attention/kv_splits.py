"""Partial results of rows that several decode programs share, and the kernel that combines them.

A program stores its partial output and the log-sum-exp of its scores. (Letting the last program combine was 6 us
slower at 7 heads a group, because one program then does the work of 7.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.decode_plan import (
    ROW_FIELDS,
    DecodePlan,
    decode_config,
    num_programs,
    tuned_rows,
    usual_groups,
)
from kernels.gpu.attention.decode_tiles import LOG2_E_IN_KERNEL, LOWEST
from kernels.gpu.launch import FastLaunch, overlaps_launches, wait_for_predecessor

COMBINE_PROGRAMS = 512  # with fewer heads in all rows, a program combines 32 dimensions
COMBINED_AT_ONCE = 128  # partial results at a time, where a program combines 32 dimensions


class DecodeWorkspace:
    """Partial results of one launch of at most `max_rows` rows, or queries of rows.

    One workspace serves launches that run one after the other: all layers of all steps of one stream.
    """

    def __init__(
        self, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, queries: int = 1,
        programs: int | None = None,
    ) -> None:  # fmt: skip
        """queries: the most of a row that share a program. programs: the most for a KV head; None: as many as
        `decode_config` may choose.
        """
        if programs is None:
            group = num_heads // num_kv_heads
            configs = {
                decode_config(rows, num_kv_heads, group, itemsize, head_dim)
                for rows in range(1, max_rows + 1)
                for itemsize in (1, 2, 4)
            }
            programs = max(num_programs(num_kv_heads, device, config) for config in configs)
        num_partials = 2 * programs * num_heads * queries
        self.outputs = torch.empty(num_partials, head_dim, dtype=torch.float32, device=device)
        self.log_sums = torch.empty(num_partials, dtype=torch.float32, device=device)

    def check(self, plan: DecodePlan, num_heads: int) -> None:
        """Raise ValueError if it is too small."""
        needed = 2 * plan.num_programs * num_heads * plan.queries
        if needed > self.outputs.shape[0]:
            raise ValueError(f"the workspace is too small: {self.outputs.shape[0]} partial results of {needed}")


@triton.jit
def add_sinks(
    mixed, mixed_odd, total, highest, sinks_ptr, kv_head, has_first_key, GROUP: tl.constexpr
):  # fmt: skip
    """Add the sink, a score without a value, to the running softmax of the program that has the row's first key."""
    members = tl.arange(0, mixed.shape[0])
    sink = tl.load(sinks_ptr + kv_head * GROUP + members, mask=members < GROUP, other=0.0).to(tl.float32)
    sink = tl.where(has_first_key, sink * LOG2_E_IN_KERNEL, float("-inf"))
    new_highest = tl.maximum(highest, sink)
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.exp2(sink - new_highest)
    return mixed * shrink[:, None], mixed_odd * shrink[:, None], total, new_highest


@triton.jit
def partial_slot(program, taken):
    """Return the slot for a program's part of a row. taken: tiles of the row that earlier programs have.

    A program has two slots, since its run may end one shared row and begin another.
    """
    return 2 * program + tl.minimum(taken, 1)


@FastLaunch
@triton.jit
def _combine_kernel(
    rows_ptr, out_ptr, outputs_ptr, log_sums_ptr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr, DIMS: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Combine a row's partial results in the order of keys: HEADS heads, DIMS dimensions. Padding gets zeros."""
    row = tl.program_id(1)
    fields_ptr = rows_ptr + row * ROW_FIELDS
    first = tl.load(fields_ptr, cache_modifier=".cg")
    last = tl.load(fields_ptr + 1, cache_modifier=".cg")
    place = 0
    if QUERIES > 1:
        place = tl.load(fields_ptr + 2, cache_modifier=".cg")
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    dims = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    is_head = heads < NUM_HEADS
    out_ptrs = out_ptr + row.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :]
    mine = (heads // GROUP) * (GROUP * QUERIES) + place * GROUP + heads % GROUP
    wait_for_predecessor(OVERLAPS)
    if last < 0:
        tl.store(out_ptrs, tl.zeros((HEADS, DIMS), out_ptr.dtype.element_ty), mask=is_head[:, None])
        return
    if first == last:
        return
    mixed, total = tl.zeros((HEADS, DIMS), tl.float32), tl.zeros((HEADS,), tl.float32)
    highest = tl.full((HEADS,), LOWEST, tl.float32)
    for some in tl.range(first, last + 1, AT_ONCE, num_stages=1):
        programs = some + tl.arange(0, AT_ONCE)
        places = partial_slot(programs, programs - first)[None, :] * (NUM_HEADS * QUERIES) + mine[:, None]
        wanted = is_head[:, None] & (programs <= last)[None, :]
        log_sums = tl.load(log_sums_ptr + places, mask=wanted, other=LOWEST)
        partial_ptrs = outputs_ptr + places.to(tl.int64)[:, :, None] * HEAD_DIM + dims[None, None, :]
        partials = tl.load(partial_ptrs, mask=wanted[:, :, None], other=0.0)
        new_highest = tl.maximum(highest, tl.max(log_sums, axis=1))
        weights, shrink = tl.exp2(log_sums - new_highest[:, None]), tl.exp2(highest - new_highest)
        mixed = mixed * shrink[:, None] + tl.sum(partials * weights[:, :, None], axis=1)
        total = total * shrink + tl.sum(weights, axis=1)
        highest = new_highest
    tl.store(out_ptrs, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_head[:, None])


def combine(plan: DecodePlan, out: Tensor, workspace: DecodeWorkspace, num_kv_heads: int) -> None:
    """Write the rows that programs share to `out` (num_rows, num_heads * head_dim), and zeros for padding."""
    head_dim = workspace.outputs.shape[1]
    num_rows, num_heads = out.shape[0], out.shape[1] // head_dim
    rows, group = tuned_rows(num_rows), num_heads // num_kv_heads
    is_few = rows * num_heads < COMBINE_PROGRAMS
    heads, dims = (1, min(head_dim, 32)) if is_few else (min(triton.next_power_of_2(group), 8), min(head_dim, 128))
    # The parts of an even split, and two more, since a run may begin within a row.
    usual = triton.next_power_of_2(plan.num_programs // usual_groups(rows, plan.queries) + 2)
    overlaps = overlaps_launches(out)
    _combine_kernel[(triton.cdiv(num_heads, heads), num_rows, head_dim // dims)](
        plan.of_rows, out, workspace.outputs, workspace.log_sums,
        NUM_HEADS=num_heads, GROUP=group, QUERIES=plan.queries, HEAD_DIM=head_dim, HEADS=heads, DIMS=dims,
        AT_ONCE=min(usual, COMBINED_AT_ONCE if is_few else 8), OVERLAPS=overlaps, num_warps=2 if is_few else 4,
        launch_pdl=overlaps,
    )  # fmt: skip
