"""Decode attention of rows with several queries, as steps that verify drafts have: their K and V are read once.

For each query and head:  out = softmax(q K^T / sqrt(head_dim)) V  over the first `length` keys of its row.

Queries of a row follow each other, each with one key more. A group of them fills the M of `tl.dot` with its heads:
row m of a program's tile is head m % GROUP of query m // GROUP, and sees no keys beyond that query's length. The grid
is (num_kv_heads, num_splits, queries), since there may be as many groups as queries: programs that have no group are
the last that start, and return at once. Shares of keys go by the length of a group's last query. A share may hold no
key that an earlier query sees; its partial result has no weight then.

Reference: `attend_sequence` of `kernels/paged_attention.py`, for each query.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.decode_tiles import LOG2_E, attend_share, listed_blocks, most_queries, prefetch_keys
from kernels.gpu.attention.kv_splits import DecodeWorkspace, combine_splits, share_of_keys, splits_of
from kernels.gpu.attention.paged_decode import launch_constants
from kernels.gpu.launching.fast_launch import FastLaunch
from kernels.gpu.launching.launch import wait_for_predecessor
from kernels.gpu.launching.launch_configs import DecodeConfig


@triton.jit
def _clear_padding(
    query, kv_head, split, spans_ptr, out_ptr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write zeros for a query that is padding of a bucket: as many programs have no group."""
    if (tl.load(spans_ptr + query) == 0) & (split == 0):
        wait_for_predecessor(OVERLAPS)
        members, dims = tl.arange(0, PADDED), tl.arange(0, HEAD_DIM)
        out_ptrs = out_ptr + (query * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
        out_ptrs = out_ptrs + members[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptrs, tl.zeros((PADDED, HEAD_DIM), out_ptr.dtype.element_ty), mask=members[:, None] < GROUP)


@FastLaunch
@triton.jit(do_not_specialize=["layer", "num_splits"])
def _paged_verify_kernel(
    q_ptr, pool_ptr, tables_ptr, lengths_ptr, spans_ptr, leaders_ptr, counts_ptr, out_ptr, outputs_ptr, log_sums_ptr,
    layer, num_splits, q_stride, table_stride, block_stride, layer_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, LISTS_BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    group = tl.program_id(2).to(tl.int64)
    count = tl.load(counts_ptr + group).to(tl.int32)
    if count == 0:  # most without a wait: each query is padding or in a group, so some program of each launch waits
        _clear_padding(group, kv_head, split, spans_ptr, out_ptr, NUM_KV_HEADS, GROUP, PADDED, HEAD_DIM, OVERLAPS)
        return
    leader = tl.load(leaders_ptr + group).to(tl.int64)
    span = tl.load(spans_ptr + leader).to(tl.int32)
    first_tile, end_tile, num_used = share_of_keys(span, None, split, num_splits, TILE)
    if split >= num_used:
        return
    keys_ptr = pool_ptr + layer.to(tl.int64) * layer_stride + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values_ptr = keys_ptr + NUM_KV_HEADS * (BLOCK_SIZE * HEAD_DIM)
    table_ptr = tables_ptr + leader * table_stride
    members = tl.arange(0, PADDED)
    is_member = members < GROUP * count
    queries, heads = members // GROUP, kv_head * GROUP + members % GROUP  # from the leader on
    lengths = tl.load(lengths_ptr + leader + queries, mask=is_member, other=0).to(tl.int32)
    ids = listed_blocks(table_ptr, first_tile * TILE // BLOCK_SIZE, span, BLOCK_SIZE)
    if AHEAD > 0:
        prefetch_keys(
            keys_ptr, values_ptr, table_ptr, first_tile, end_tile, span, None, block_stride,
            HEAD_DIM, BLOCK_SIZE, TILE, AHEAD, LINE,
        )  # fmt: skip
    wait_for_predecessor(OVERLAPS)

    dims = tl.arange(0, HEAD_DIM)
    q_ptrs = q_ptr + leader * q_stride + (queries * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
    q = tl.load(q_ptrs, mask=is_member[:, None], other=0.0).to(COMPUTE)
    mixed, mixed_odd, total, highest = attend_share(
        q, ids, keys_ptr, values_ptr, table_ptr, first_tile, end_tile, span, None, block_stride, scale,
        HEAD_DIM, BLOCK_SIZE, TILE, NUM_STAGES, LISTS_BLOCKS, lengths,
    )  # fmt: skip
    if pool_ptr.dtype.element_ty == tl.float8e4nv:
        mixed = tl.reshape(tl.join(mixed, mixed_odd), (PADDED, HEAD_DIM))
    total = tl.where(total > 0, total, 1.0)
    mixed = mixed / total[:, None]
    first, places = leader * (NUM_KV_HEADS * GROUP), queries * (NUM_KV_HEADS * GROUP) + heads
    if num_used == 1:
        out_ptrs = out_ptr + first * HEAD_DIM + places[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptrs, mixed.to(out_ptr.dtype.element_ty), mask=is_member[:, None])
    else:
        first, mine = first * num_splits, places * num_splits + split
        output_ptrs = outputs_ptr + first * HEAD_DIM + mine[:, None] * HEAD_DIM + dims[None, :]
        tl.store(output_ptrs, mixed, mask=is_member[:, None])
        tl.store(log_sums_ptr + first + mine, highest + tl.log2(total), mask=is_member)


def paged_verify(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, lengths: Tensor, groups: Tensor,
    workspace: DecodeWorkspace, config: DecodeConfig | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention of groups of queries. Captured in a graph, it follows what block_tables and the int32 tensors hold.

    q: (num_queries, num_heads, head_dim), heads contiguous, queries of any stride (a view of qkv will do).
    pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), contiguous; block_size a power of two. Of
        q's type or float8_e4m3fn.
    block_tables: int32 (num_queries, any), a query's that of its row. lengths: int32 (num_queries,), the query's own
        token included; 0 for padding.
    groups: int32 (3, num_queries). Of each query the length of its group's last one, 0 for padding. Then, a column
        per group: its first query, and how many it has, at most `most_queries`; 0 after the last group. These three
        are inputs of the step: they are read before the previous kernel has ended.
    workspace: made for `most_queries`.
    Returns (num_queries, num_heads * head_dim).
    """
    num_queries, num_heads, head_dim = q.shape
    most = most_queries(num_heads // pool.shape[3])
    out = torch.empty(num_queries, num_heads * head_dim, dtype=q.dtype, device=q.device)
    if num_queries == 0:
        return out
    config, num_splits = splits_of(num_queries, num_heads, pool, workspace, config, splits, 0, most)
    constants = launch_constants(q, pool, config, most)
    constants["num_warps"] = max(config.num_warps, constants["PADDED"] // 16)  # one warp cannot hold the sums of 32
    spans, leaders, counts = groups[0], groups[1], groups[2]
    _paged_verify_kernel[(pool.shape[3], num_splits, num_queries)](
        q, pool, block_tables, lengths, spans, leaders, counts, out, workspace.outputs, workspace.log_sums,
        layer, num_splits, q.stride(0), block_tables.stride(0), pool.stride(0), pool.stride(1),
        LOG2_E / math.sqrt(head_dim), **constants,
    )  # fmt: skip
    if num_splits > 1:
        combine_splits(spans, out, workspace, num_splits, config.tile)
    return out
