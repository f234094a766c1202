"""Decode attention for rows with several queries, as in steps that verify drafts; loads their K and V once.

For each query and head:  out = softmax(q K^T / sqrt(head_dim)) V  over the first `length` keys of its row.

A row's queries are contiguous, each with one more key than the one before. A group of queries fills the M of `tl.dot`
with its heads: row m of a program's tile is head m % GROUP of query m // GROUP, and sees no keys beyond that query's
length. Programs share keys as in `paged_decode`, with a group in place of a row there and the length of its last
query. A program's keys may all be too late for an earlier query; that partial result gets no weight.

Reference: `attend_causally` of `kernels/paged_attention.py`, for each query.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.decode_plan import DecodePlan, tiles_of
from kernels.gpu.attention.decode_tiles import LOG2_E, attend_share, listed_blocks, prefetch_keys
from kernels.gpu.attention.kv_splits import DecodeWorkspace, combine, partial_slot
from kernels.gpu.attention.paged_decode import launch_constants, planned
from kernels.gpu.launch import FastLaunch, wait_for_predecessor


def most_queries(group: int) -> int:
    """Return how many queries of a row share a program: what fits a tile of 16 heads, or of 32 where that is few."""
    fit = 16 // group
    return fit if fit >= 4 else max(1, min(4, 32 // group))


@FastLaunch
@triton.jit(do_not_specialize=["layer"])
def _paged_verify_kernel(
    q_ptr, pool_ptr, tables_ptr, lengths_ptr, spans_ptr, leaders_ptr, counts_ptr, programs_ptr, out_ptr, outputs_ptr,
    log_sums_ptr, layer, q_stride, table_stride, block_stride, layer_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, LISTS_BLOCKS: tl.constexpr, QUERIES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    kv_head, program = tl.program_id(0), tl.program_id(1)
    first_group, last_group, taken, left, span = planned(programs_ptr, program)
    keys_ptr = pool_ptr + layer.to(tl.int64) * layer_stride + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values_ptr = keys_ptr + NUM_KV_HEADS * (BLOCK_SIZE * HEAD_DIM)
    leader = tl.load(leaders_ptr + first_group).to(tl.int64)
    table_ptr = tables_ptr + leader * table_stride
    ids = listed_blocks(table_ptr, taken * TILE // BLOCK_SIZE, span, BLOCK_SIZE)
    if AHEAD > 0:
        prefetch_keys(
            keys_ptr, values_ptr, table_ptr, taken, taken + left, span, None, block_stride,
            HEAD_DIM, BLOCK_SIZE, TILE, AHEAD, LINE,
        )  # fmt: skip
    wait_for_predecessor(OVERLAPS)

    members = tl.arange(0, PADDED)
    dims = tl.arange(0, HEAD_DIM)
    queries, heads = members // GROUP, kv_head * GROUP + members % GROUP  # counted from the leader
    for group in tl.range(first_group, last_group + 1, num_stages=1):
        num_tiles = tiles_of(span, TILE, 0)
        num_mine = tl.minimum(left, num_tiles - taken)
        is_member = members < GROUP * tl.load(counts_ptr + group)
        lengths = tl.load(lengths_ptr + leader + queries, mask=is_member, other=0).to(tl.int32)
        q_ptrs = q_ptr + leader * q_stride + (queries * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
        q = tl.load(q_ptrs, mask=is_member[:, None], other=0.0).to(COMPUTE)
        mixed, mixed_odd, total, highest = attend_share(
            q, ids, keys_ptr, values_ptr, table_ptr, taken, taken + num_mine, span, None, block_stride, scale,
            HEAD_DIM, BLOCK_SIZE, TILE, NUM_STAGES, LISTS_BLOCKS, lengths,
        )  # fmt: skip
        if pool_ptr.dtype.element_ty == tl.float8e4nv:
            mixed = tl.reshape(tl.join(mixed, mixed_odd), (PADDED, HEAD_DIM))
        total = tl.where(total > 0, total, 1.0)
        mixed = mixed * (1.0 / total)[:, None]
        if num_mine == num_tiles:
            out_ptrs = out_ptr + leader * (NUM_KV_HEADS * GROUP * HEAD_DIM)
            out_ptrs = out_ptrs + (queries * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out_ptrs, mixed.to(out_ptr.dtype.element_ty), mask=is_member[:, None])
        else:
            slot = partial_slot(program, taken).to(tl.int64) * NUM_KV_HEADS + kv_head
            places = slot * (GROUP * QUERIES) + members
            tl.store(outputs_ptr + places[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_member[:, None])
            tl.store(log_sums_ptr + places, highest + tl.log2(total), mask=is_member)
        left -= num_mine
        taken = 0
        leader = tl.load(leaders_ptr + group + 1, mask=group < last_group, other=0).to(tl.int64)
        span = tl.load(spans_ptr + leader).to(tl.int32)
        table_ptr = tables_ptr + leader * table_stride
        ids = listed_blocks(table_ptr, 0, span, BLOCK_SIZE)


def paged_verify(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, lengths: Tensor, groups: Tensor, plan: DecodePlan,
    workspace: DecodeWorkspace,
) -> Tensor:  # fmt: skip
    """Compute attention for groups of queries. A captured graph follows block_tables and the int32 tensors.

    q: (num_queries, num_heads, head_dim), heads contiguous, queries of any stride (a view of qkv is fine).
    pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), contiguous; block_size a power of two. In
        q's dtype or float8_e4m3fn.
    block_tables: int32 (num_queries, any), for each query that of its row. lengths: int32 (num_queries,), including
        the query's own token; 0 for padding.
    groups: int32 (3, num_queries): for each query the length of the last query of its group, 0 for padding; then for
        each group its first query and its number of queries, at most `most_queries`, 0 after the last group. These
        three are inputs of the step: they are read before the previous kernel has ended.
    plan: `plan_decode` of groups[0] and the groups. workspace: made for `most_queries`.
    Returns (num_queries, num_heads * head_dim).
    """
    num_queries, num_heads, head_dim = q.shape
    out = torch.empty(num_queries, num_heads * head_dim, dtype=q.dtype, device=q.device)
    if num_queries == 0:
        return out
    workspace.check(plan, num_heads)
    constants = launch_constants(q, pool, plan.config, plan.queries)
    constants["num_warps"] = max(plan.config.num_warps, constants["PADDED"] // 16)  # one warp cannot hold sums of 32
    spans, leaders, counts = groups[0], groups[1], groups[2]
    _paged_verify_kernel[(pool.shape[3], plan.num_programs)](
        q, pool, block_tables, lengths, spans, leaders, counts, plan.of_programs, out, workspace.outputs,
        workspace.log_sums, layer, q.stride(0), block_tables.stride(0), pool.stride(0), pool.stride(1),
        LOG2_E / math.sqrt(head_dim), **constants, QUERIES=plan.queries,
    )  # fmt: skip
    combine(plan, out, workspace, pool.shape[3])
    return out
