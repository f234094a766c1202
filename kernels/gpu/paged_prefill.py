"""Prefill attention over the paged KV pool on a GPU: chunks of queries against all keys up to them.

For query i of a sequence at position p_i: softmax(q_i K[0..p_i]^T / sqrt(head_dim)) V[0..p_i]; the chunk's own K
and V are in the pool already. Rows of different lengths are packed one after the other.

A program takes one KV head and TILE_M consecutive rows of (token, query head of the group), so that K and V are read
once for a whole group and a tile spans few positions: little work is lost at the diagonal. Keys before the tile's
first position need no mask; the rest do. The host lists the tiles, longest first, so that no long one starts last.

Reference: `attend_sequence` of `kernels/paged_attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.paged_decode import LOG2_E, _tile_offsets, compute_dtype


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """tile_m: rows of (token, head) a program holds; tile_n: keys per step of its loop.

    Of 8 settings on an H200 with pages of 64, TFLOP/s on Qwen2.5-7B for 8k | 512 over 8k of context | 2k over 16k:
    128x128, 8 warps, 2 stages 436 | 350 | 374; 64x64, 4, 3 411 | 323 | 338; 128x64, 8, 2 403 | 297 | 317. At 2k
    without context 64x64 is 6 to 10% faster.
    """

    tile_m: int = 128
    tile_n: int = 128
    num_warps: int = 8
    num_stages: int = 2


DEFAULT_TUNING = PrefillTuning()


def prefill_tiles(
    query_starts: Sequence[int], seq_lens: Sequence[int], group: int, tuning: PrefillTuning = DEFAULT_TUNING
) -> list[tuple[int, int, int, int]]:
    """The programs' work, longest first: (row, index of the tile's first token, its position, tokens it has).

    query_starts: each row's first token, and the number of tokens at the end. seq_lens: keys that each row's last
    query sees. A row without queries has no tile.
    """
    tokens_per_tile = max(tuning.tile_m // group, 1)
    tiles = []
    for row, seq_len in enumerate(seq_lens):
        start, stop = query_starts[row], query_starts[row + 1]
        for first in range(start, stop, tokens_per_tile):
            count = min(tokens_per_tile, stop - first)
            tiles.append((row, first, seq_len - (stop - first), count))
    return sorted(tiles, key=lambda tile: -tile[2])


@triton.jit
def _attend_tile(
    q, mixed, total, highest, keys_ptr, values_ptr, table_ptr, positions, first_key, end_key, block_stride, scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Add keys [first_key, end_key) to a tile's running softmax; without MASKED all rows see all of them."""
    dims = tl.arange(0, HEAD_DIM)
    for first in tl.range(first_key, end_key, TILE_N, num_stages=NUM_STAGES):
        offsets = _tile_offsets(table_ptr, first, end_key, block_stride, BLOCK_SIZE, TILE_N, HEAD_DIM)
        keys = tl.load(keys_ptr + offsets[:, None] + dims[None, :]).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            tokens = first + tl.arange(0, TILE_N)
            scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
            # Never-written memory after the last key may hold NaN, and 0 * NaN is NaN.
            values = tl.load(
                values_ptr + offsets[:, None] + dims[None, :], mask=(tokens < end_key)[:, None], other=0.0
            ).to(q.dtype)
        else:
            values = tl.load(values_ptr + offsets[:, None] + dims[None, :]).to(q.dtype)
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(q.dtype), values, mixed * shrink[:, None], input_precision="ieee")
        highest = new_highest
    return mixed, total, highest


@triton.jit(do_not_specialize=["layer"])
def _paged_prefill_kernel(
    q_ptr, pool_ptr, tables_ptr, tiles_ptr, out_ptr,
    layer, q_stride, table_stride, block_stride, layer_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    row = tl.load(tile_ptr).to(tl.int64)
    first_token = tl.load(tile_ptr + 1)
    first_position = tl.load(tile_ptr + 2)
    count = tl.load(tile_ptr + 3)

    members = tl.arange(0, TILE_M)
    dims = tl.arange(0, HEAD_DIM)
    exists = (members < count * GROUP)[:, None]
    tokens = (first_token + members // GROUP).to(tl.int64)
    heads = kv_head * GROUP + members % GROUP
    q = tl.load(
        q_ptr + tokens[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=exists, other=0.0
    ).to(COMPUTE)
    positions = first_position + tl.minimum(members // GROUP, count - 1)
    keys_ptr = pool_ptr + layer.to(tl.int64) * layer_stride + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values_ptr = keys_ptr + NUM_KV_HEADS * (BLOCK_SIZE * HEAD_DIM)
    table_ptr = tables_ptr + row * table_stride

    highest = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    mixed = tl.zeros((TILE_M, HEAD_DIM), tl.float32)
    num_full = (first_position + 1) // TILE_N * TILE_N
    mixed, total, highest = _attend_tile(
        q, mixed, total, highest, keys_ptr, values_ptr, table_ptr, positions, 0, num_full, block_stride, scale,
        False, HEAD_DIM, BLOCK_SIZE, TILE_N, NUM_STAGES,
    )  # fmt: skip
    mixed, total, highest = _attend_tile(
        q, mixed, total, highest, keys_ptr, values_ptr, table_ptr, positions, num_full, first_position + count,
        block_stride, scale, True, HEAD_DIM, BLOCK_SIZE, TILE_N, 1,
    )  # fmt: skip
    mixed = mixed / total[:, None]
    target = out_ptr + (tokens[:, None] * (NUM_KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(target, mixed.to(out_ptr.dtype.element_ty), mask=exists)


def paged_prefill(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, tiles: Tensor, tuning: PrefillTuning = DEFAULT_TUNING,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of the tokens that `tiles` names.

    q: (num_tokens, num_heads, head_dim), heads contiguous, tokens of any stride.
    pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), contiguous; block_size a power of two. Of
        q's type or float8_e4m3fn.
    block_tables: int32 (num_rows, any). tiles: int32 (num_tiles, 4), from `prefill_tiles` with the same tuning.
    out: (num_tokens, num_heads * head_dim), contiguous; tokens in no tile are left as they are. Returns it.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    if out is None:
        out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype, device=q.device)
    if tiles.shape[0] == 0:
        return out
    _paged_prefill_kernel[(num_kv_heads, tiles.shape[0])](
        q, pool, block_tables, tiles, out,
        layer, q.stride(0), block_tables.stride(0), pool.stride(0), pool.stride(1), LOG2_E / math.sqrt(head_dim),
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        TILE_M=tuning.tile_m, TILE_N=tuning.tile_n, NUM_STAGES=tuning.num_stages, COMPUTE=compute_dtype(q, pool),
        num_warps=tuning.num_warps,
    )  # fmt: skip
    return out
