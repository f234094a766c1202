"""Decode attention over the paged KV pool on a GPU: one query per sequence, split over the sequence's keys.

For each head:  out = softmax(q K^T / sqrt(head_dim)) V  over the sequence's first `length` keys, or with a window
over the last of these. A sink adds one score without a value.

The query heads that share a KV head fill the M of `tl.dot` (padded to 16), so K and V are read once. The grid is
(num_kv_heads, programs) and depends only on the batch bucket: lengths, block tables and the plan, which divides the
keys among programs (`kernels/gpu/attention/decode_plan.py`), are read on the device. A program reads block ids before
its loop over a row's keys, or in the loop, which then needs half of its pipeline stages for them. A second kernel
combines rows that several programs share (`kernels/gpu/attention/kv_splits.py`).

Reference: `windowed_attention` of `tests/kernels/helpers.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.decode_plan import PROGRAM_FIELDS, DecodePlan, skipped_tiles, tiles_of, usual_groups
from kernels.gpu.attention.decode_tiles import (
    LOG2_E,
    attend_share,
    compute_dtype,
    listed_blocks,
    padded_group,
    prefetch_keys,
)
from kernels.gpu.attention.kv_splits import DecodeWorkspace, add_sinks, combine, partial_slot
from kernels.gpu.launch import FastLaunch, overlaps_launches, wait_for_predecessor
from kernels.gpu.tuning import MAX_PREFETCH_ROWS, PREFETCHED_KEYS, DecodeConfig


@triton.jit
def planned(programs_ptr, program):
    """Load a program's first row, last row, tiles of the first row that earlier programs take, tiles of its run, and
    keys of the first row.
    """
    fields_ptr = programs_ptr + program * PROGRAM_FIELDS
    first = tl.load(fields_ptr, cache_modifier=".cg")  # skips L1, which may hold the plan of an earlier step
    last = tl.load(fields_ptr + 1, cache_modifier=".cg")
    taken = tl.load(fields_ptr + 2, cache_modifier=".cg")
    left = tl.load(fields_ptr + 3, cache_modifier=".cg")
    return first, last, taken, left, tl.load(fields_ptr + 4, cache_modifier=".cg")


@FastLaunch
@triton.jit(do_not_specialize=["layer"])
def _paged_decode_kernel(
    q_ptr, pool_ptr, tables_ptr, lengths_ptr, programs_ptr, out_ptr, outputs_ptr, log_sums_ptr, sinks_ptr,
    layer, q_stride, table_stride, block_stride, layer_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, LISTS_BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    kv_head, program = tl.program_id(0), tl.program_id(1)
    first_row, last_row, taken, left, length = planned(programs_ptr, program)
    keys_ptr = pool_ptr + layer.to(tl.int64) * layer_stride + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values_ptr = keys_ptr + NUM_KV_HEADS * (BLOCK_SIZE * HEAD_DIM)
    table_ptr = tables_ptr + first_row * table_stride
    first_tile = taken + skipped_tiles(length, TILE, WINDOW)
    ids = listed_blocks(table_ptr, first_tile * TILE // BLOCK_SIZE, length, BLOCK_SIZE)
    if AHEAD > 0:
        oldest = None
        if WINDOW > 0:
            oldest = tl.maximum(length - WINDOW, 0)
        prefetch_keys(
            keys_ptr, values_ptr, table_ptr, first_tile, first_tile + left, length, oldest, block_stride,
            HEAD_DIM, BLOCK_SIZE, TILE, AHEAD, LINE,
        )  # fmt: skip
    wait_for_predecessor(OVERLAPS)

    members = tl.arange(0, PADDED)
    dims = tl.arange(0, HEAD_DIM)
    heads = kv_head * GROUP + members
    is_member = (members < GROUP)[:, None]
    for row in tl.range(first_row, last_row + 1, num_stages=1):
        num_tiles = tiles_of(length, TILE, WINDOW)
        num_mine = tl.minimum(left, num_tiles - taken)
        first_tile = taken + skipped_tiles(length, TILE, WINDOW)
        first_key = None
        if WINDOW > 0:
            first_key = tl.maximum(length - WINDOW, 0)
        q_ptrs = q_ptr + row * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptrs, mask=is_member, other=0.0).to(COMPUTE)
        mixed, mixed_odd, total, highest = attend_share(
            q, ids, keys_ptr, values_ptr, table_ptr, first_tile, first_tile + num_mine, length, first_key,
            block_stride, scale, HEAD_DIM, BLOCK_SIZE, TILE, NUM_STAGES, LISTS_BLOCKS,
        )  # fmt: skip
        if HAS_SINKS:
            mixed, mixed_odd, total, highest = add_sinks(
                mixed, mixed_odd, total, highest, sinks_ptr, kv_head, taken == 0, GROUP
            )  # fmt: skip
        if pool_ptr.dtype.element_ty == tl.float8e4nv:
            mixed = tl.reshape(tl.join(mixed, mixed_odd), (PADDED, HEAD_DIM))
        # Rows without keys may lie between others.
        mixed = mixed * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
        if num_mine == num_tiles:
            out_ptrs = out_ptr + row * (NUM_KV_HEADS * GROUP * HEAD_DIM)
            out_ptrs = out_ptrs + heads[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out_ptrs, mixed.to(out_ptr.dtype.element_ty), mask=is_member)
        else:
            places = partial_slot(program, taken).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
            tl.store(outputs_ptr + places[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_member)
            tl.store(log_sums_ptr + places, highest + tl.log2(total), mask=members < GROUP)
        left -= num_mine
        taken = 0
        length = tl.load(lengths_ptr + row + 1, mask=row < last_row, other=0).to(tl.int32)
        table_ptr += table_stride
        ids = listed_blocks(table_ptr, skipped_tiles(length, TILE, WINDOW) * TILE // BLOCK_SIZE, length, BLOCK_SIZE)


def launch_constants(q: Tensor, pool: Tensor, config: DecodeConfig, queries: int = 1) -> dict[str, Any]:
    """Return the constants and options of both decode kernels. queries: the most in one group."""
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    group, overlaps = q.shape[1] // num_kv_heads, overlaps_launches(q)
    is_prefetched = overlaps and usual_groups(q.shape[0], queries) <= MAX_PREFETCH_ROWS
    return {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "PADDED": padded_group(group * queries), "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size, "TILE": config.tile, "NUM_STAGES": config.num_stages,
        "COMPUTE": compute_dtype(q, pool), "AHEAD": PREFETCHED_KEYS if is_prefetched else 0,
        "LINE": min(128 // pool.itemsize, head_dim), "LISTS_BLOCKS": config.lists_blocks, "OVERLAPS": overlaps,
        "num_warps": config.num_warps, "launch_pdl": overlaps,
    }  # fmt: skip


def paged_decode(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, lengths: Tensor, plan: DecodePlan,
    workspace: DecodeWorkspace, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend with one query per row. In a captured graph, block_tables and lengths may change between replays.

    q: (num_rows, num_heads, head_dim), heads contiguous, rows of any stride (a view of qkv will do).
    pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), contiguous; block_size a power of two. Of
        q's type or float8_e4m3fn.
    block_tables: int32 (num_rows, any). lengths: int32 (num_rows,), the new token included; 0 for padding rows. Both
        are inputs of the step: they are read before the previous kernel has ended.
    plan: `plan_decode` of these lengths. With a window, entries of tables before it are not read. sinks:
        (num_heads,) or None.
    Returns (num_rows, num_heads * head_dim). Raises ValueError if the workspace is too small.
    """
    num_rows, num_heads, head_dim = q.shape
    out = torch.empty(num_rows, num_heads * head_dim, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    workspace.check(plan, num_heads)
    _paged_decode_kernel[(pool.shape[3], plan.num_programs)](
        q, pool, block_tables, lengths, plan.of_programs, out, workspace.outputs, workspace.log_sums,
        q if sinks is None else sinks,
        layer, q.stride(0), block_tables.stride(0), pool.stride(0), pool.stride(1),
        LOG2_E / math.sqrt(head_dim), **launch_constants(q, pool, plan.config),
        WINDOW=plan.window, HAS_SINKS=sinks is not None,
    )  # fmt: skip
    combine(plan, out, workspace, pool.shape[3])
    return out
