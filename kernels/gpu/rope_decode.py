"""Decode attention that norms, rotates and stores the new token itself: `rope.py` and `paged_decode.py` in one.

Of few rows, starting a kernel takes longer than a rotation, so each program of decode attention rotates its own query
heads. The one whose share ends with the sequence stores the KV head's new key and value first, and finds them behind
a barrier of its own threads: no other program reads that slot, so none waits for another.

Everything is computed in the order, and rounded to the types, of the two kernels, so the bits are theirs; but a
compiled QK norm adds up squares in an order that follows the layout.

Rows must be of different sequences: none sees the key that another one stores.

Reference: `rope_reference` of `kernels/gpu/rope.py`, then `attend_sequence` of `kernels/paged_attention.py`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.decode_tiles import (
    LOG2_E,
    attend_share,
    listed_blocks,
    prefetch_keys,
)
from kernels.gpu.fast_launch import FastLaunch
from kernels.gpu.kv_splits import DecodeWorkspace, combine_splits, share_of_keys, splits_of, store_attended
from kernels.gpu.launch import wait_for_predecessor
from kernels.gpu.launch_configs import DecodeConfig
from kernels.gpu.paged_decode import launch_constants
from kernels.gpu.rope import as_stored, check_heads, load_halves, norm_and_rotate
from kernels.gpu.split_k import sum_partials


@triton.jit
def _load_heads(
    qkv_ptr, heads, exists, angles_ptr, split_stride, HEAD_DIM: tl.constexpr, NUM_PARTIALS: tl.constexpr
):  # fmt: skip
    """Both halves of a token's heads, and their cosines and sines, of its row of the table: (heads, HEAD_DIM / 2)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, HALF)[None, :]
    angles = angles_ptr + (heads * 0)[:, None] + dims
    cos = tl.load(angles).to(tl.float32)
    sin = tl.load(angles + HEAD_DIM + HALF).to(tl.float32)
    first, second = load_halves(
        qkv_ptr + heads[:, None] * HEAD_DIM + dims, exists, split_stride, HALF, NUM_PARTIALS
    )  # fmt: skip
    return first, second, cos, sin


@triton.jit
def _store_new_token(
    qkv_ptr, k_head, keys_ptr, values_ptr, slot, angles_ptr, norm_ptr, split_stride, block_stride, eps,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_PARTIALS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Store a token's key and value of one KV head; slot -1: nothing. k_head: its key's index among all heads."""
    HALF: tl.constexpr = HEAD_DIM // 2
    heads = k_head + tl.arange(0, 1)
    dims, half = tl.arange(0, HEAD_DIM)[None, :], tl.arange(0, HALF)[None, :]
    value_at = (heads + NUM_KV_HEADS)[:, None] * HEAD_DIM + dims
    value = sum_partials(qkv_ptr, value_at, True, split_stride, NUM_PARTIALS)
    first, second, cos, sin = _load_heads(qkv_ptr, heads, True, angles_ptr, split_stride, HEAD_DIM, NUM_PARTIALS)
    weight = norm_ptr + heads[:, None] * HEAD_DIM + half
    first, second = norm_and_rotate(first, second, True, cos, sin, weight, eps, HALF, HAS_NORM)
    place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * HEAD_DIM
    tl.store(keys_ptr + place + half, as_stored(first, keys_ptr.dtype.element_ty), mask=slot >= 0)
    tl.store(keys_ptr + place + HALF + half, as_stored(second, keys_ptr.dtype.element_ty), mask=slot >= 0)
    tl.store(values_ptr + place + dims, as_stored(value, values_ptr.dtype.element_ty), mask=slot >= 0)


@FastLaunch
@triton.jit(do_not_specialize=["layer", "num_splits"])
def _rope_decode_kernel(
    qkv_ptr, angles_ptr, slots_ptr, norm_ptr, pool_ptr, tables_ptr, lengths_ptr, out_ptr, outputs_ptr, log_sums_ptr,
    sinks_ptr, layer, num_splits, split_stride, table_stride, block_stride, layer_stride, scale, eps,
    NUM_PARTIALS: tl.constexpr, HAS_NORM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr, AHEAD: tl.constexpr, LINE: tl.constexpr,
    LISTS_BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    slot = tl.load(slots_ptr + row).to(tl.int64)
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

    qkv_ptr += row * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    angles_ptr += tl.maximum(length - 1, 0).to(tl.int64) * (2 * HEAD_DIM)
    members = tl.arange(0, PADDED)
    heads = kv_head * GROUP + members
    is_member = (members < GROUP)[:, None]
    first, second, cos, sin = _load_heads(
        qkv_ptr, heads, is_member, angles_ptr, split_stride, HEAD_DIM, NUM_PARTIALS
    )  # fmt: skip
    if split == num_used - 1:
        _store_new_token(
            qkv_ptr, NUM_HEADS + kv_head, keys_ptr, values_ptr, slot, angles_ptr, norm_ptr, split_stride,
            block_stride, eps, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_PARTIALS, HAS_NORM,
        )  # fmt: skip
        tl.debug_barrier()  # what its threads have stored, the program's loads find
    weight = norm_ptr + heads[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM // 2)[None, :]
    first, second = norm_and_rotate(first, second, is_member, cos, sin, weight, eps, HEAD_DIM // 2, HAS_NORM)
    q = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (PADDED, HEAD_DIM))
    q = q.to(qkv_ptr.dtype.element_ty).to(COMPUTE)  # as it would be stored and read
    mixed, mixed_odd, total, highest = attend_share(
        q, ids, keys_ptr, values_ptr, table_ptr, first_tile, end_tile, length, first_key, block_stride, scale,
        HEAD_DIM, BLOCK_SIZE, TILE, NUM_STAGES, LISTS_BLOCKS,
    )  # fmt: skip
    store_attended(
        mixed, mixed_odd, total, highest, out_ptr, outputs_ptr, log_sums_ptr, sinks_ptr, row, kv_head, split,
        num_splits, num_used, NUM_KV_HEADS, GROUP, HEAD_DIM, pool_ptr.dtype.element_ty == tl.float8e4nv, HAS_SINKS,
    )  # fmt: skip


def rope_and_decode(
    qkv: Tensor, table: Tensor, slots: Tensor, qk_norm: Tensor | None, eps: float, pool: Tensor, layer: int,
    block_tables: Tensor, lengths: Tensor, workspace: DecodeWorkspace, config: DecodeConfig | None = None,
    splits: int | None = None, window: int = 0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What `rope_and_write_kv` and then `paged_decode` do, of rows that are each the last token of another sequence.

    qkv, table, slots, qk_norm, pool: see `rope_and_write_kv`; qkv is only read. A row's position is its length less
    one. Others: see `paged_decode`. Lengths, tables and slots are read before the previous kernel has ended.
    Returns (num_rows, num_heads * head_dim).
    """
    check_heads(qkv, table, pool)
    num_rows, num_all_heads, head_dim = qkv.shape[-3:]
    num_kv_heads = pool.shape[3]
    num_heads = num_all_heads - 2 * num_kv_heads
    out = torch.empty(num_rows, num_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    config, count = splits_of(num_rows, num_heads, pool, workspace, config, splits, window)
    _rope_decode_kernel[(num_kv_heads, num_rows, count)](
        qkv, table, slots, table if qk_norm is None else qk_norm, pool, block_tables, lengths, out,
        workspace.outputs, workspace.log_sums, qkv if sinks is None else sinks,
        layer, count, qkv.stride(-3) * num_rows, block_tables.stride(0), pool.stride(0), pool.stride(1),
        LOG2_E / math.sqrt(head_dim), eps,
        NUM_PARTIALS=qkv.shape[0] if qkv.dim() == 4 else 1, HAS_NORM=qk_norm is not None,
        **launch_constants(qkv, num_heads, pool, config, window, sinks is not None),
    )  # fmt: skip
    if count > 1:
        combine_splits(lengths, out, workspace, count, config.tile, window)
    return out
