"""Decode attention over the paged KV pool on a GPU: one query per sequence, split over the sequence's keys.

For each head:  out = softmax(q K^T / sqrt(head_dim)) V  over the sequence's first `length` keys, or with a window
over the last of these; with a sink, one score without a value beside them.

The query heads that share a KV head fill the M of `tl.dot` (padded to 16), so K and V are read once. The grid is
(num_kv_heads, rows, num_splits) and depends on nothing but the batch bucket: lengths and block tables are read on
the device. A program takes an equal share of its sequence's tiles, from the window's first on; programs without a
share return. It reads the ids of its blocks before its loop, or in it, at the cost of half of the loop's stages.
Splits are combined by a second kernel (`kernels/gpu/attention/kv_splits.py`); a sequence of one share is written
directly.

Reference: `attend_sequence` of `kernels/paged_attention.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.decode_tiles import (
    LOG2_E,
    attend_share,
    compute_dtype,
    listed_blocks,
    padded_group,
    prefetch_keys,
)
from kernels.gpu.attention.kv_splits import (
    DecodeWorkspace,
    combine_splits,
    share_of_keys,
    splits_of,
    store_attended,
    usual_groups,
)
from kernels.gpu.launching.fast_launch import FastLaunch
from kernels.gpu.launching.launch import overlaps_launches, wait_for_predecessor
from kernels.gpu.launching.launch_configs import DecodeConfig
from kernels.gpu.launching.tuning import MAX_PREFETCH_ROWS, PREFETCHED_KEYS


@FastLaunch
@triton.jit(do_not_specialize=["layer", "num_splits"])
def _paged_decode_kernel(
    q_ptr, pool_ptr, tables_ptr, lengths_ptr, out_ptr, outputs_ptr, log_sums_ptr, sinks_ptr,
    layer, num_splits, q_stride, table_stride, block_stride, layer_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, LISTS_BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    first_key = None
    if WINDOW > 0:
        first_key = tl.maximum(length - WINDOW, 0)
    first_tile, end_tile, num_used = share_of_keys(length, first_key, split, num_splits, TILE)
    keys_ptr = pool_ptr + layer.to(tl.int64) * layer_stride + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values_ptr = keys_ptr + NUM_KV_HEADS * (BLOCK_SIZE * HEAD_DIM)
    table_ptr = tables_ptr + row * table_stride
    ids = listed_blocks(table_ptr, first_tile * TILE // BLOCK_SIZE, length, BLOCK_SIZE)
    if AHEAD > 0:
        prefetch_keys(
            keys_ptr, values_ptr, table_ptr, first_tile, end_tile, length, first_key, block_stride,
            HEAD_DIM, BLOCK_SIZE, TILE, AHEAD, LINE,
        )  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    if split >= num_used:
        return

    members = tl.arange(0, PADDED)
    dims = tl.arange(0, HEAD_DIM)
    heads = kv_head * GROUP + members
    is_member = (members < GROUP)[:, None]
    q = tl.load(q_ptr + row * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=is_member, other=0.0)
    q = q.to(COMPUTE)
    mixed, mixed_odd, total, highest = attend_share(
        q, ids, keys_ptr, values_ptr, table_ptr, first_tile, end_tile, length, first_key, block_stride, scale,
        HEAD_DIM, BLOCK_SIZE, TILE, NUM_STAGES, LISTS_BLOCKS,
    )  # fmt: skip
    store_attended(
        mixed, mixed_odd, total, highest, out_ptr, outputs_ptr, log_sums_ptr, sinks_ptr, row, kv_head, split,
        num_splits, num_used, NUM_KV_HEADS, GROUP, HEAD_DIM, pool_ptr.dtype.element_ty == tl.float8e4nv, HAS_SINKS,
    )  # fmt: skip


def launch_constants(q: Tensor, pool: Tensor, config: DecodeConfig, queries: int = 1) -> dict[str, Any]:
    """Constants and options that both kernels of decode attention have. queries: see `splits_of`."""
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
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, lengths: Tensor, workspace: DecodeWorkspace,
    config: DecodeConfig | None = None, splits: int | None = None, window: int = 0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query per row. Captured in a graph, it follows what block_tables and lengths then hold.

    q: (num_rows, num_heads, head_dim), heads contiguous, rows of any stride (a view of qkv will do).
    pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), contiguous; block_size a power of two. Of
        q's type or float8_e4m3fn.
    block_tables: int32 (num_rows, any). lengths: int32 (num_rows,), the new token included; 0 for padding rows. Both
        are inputs of the step: they are read before the previous kernel has ended.
    window: keys that a query sees, itself included; 0: all. Entries of tables before it are not read. sinks:
        (num_heads,) or None.
    Returns (num_rows, num_heads * head_dim).
    """
    num_rows, num_heads, head_dim = q.shape
    out = torch.empty(num_rows, num_heads * head_dim, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    config, count = splits_of(num_rows, num_heads, pool, workspace, config, splits, window)
    _paged_decode_kernel[(pool.shape[3], num_rows, count)](
        q, pool, block_tables, lengths, out, workspace.outputs, workspace.log_sums, q if sinks is None else sinks,
        layer, count, q.stride(0), block_tables.stride(0), pool.stride(0), pool.stride(1),
        LOG2_E / math.sqrt(head_dim), **launch_constants(q, pool, config),
        WINDOW=window, HAS_SINKS=sinks is not None,
    )  # fmt: skip
    if count > 1:
        combine_splits(lengths, out, workspace, count, config.tile, window)
    return out
