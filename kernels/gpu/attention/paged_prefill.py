"""Prefill attention over the paged KV pool on a GPU: chunks of queries against all keys up to them.

For query i of a sequence at position p_i: softmax(q_i K[a..p_i]^T / sqrt(head_dim)) V[a..p_i], where a is 0, or with
a window w the larger of 0 and p_i - w + 1. A sink adds one score without a value. The chunk's own K and V are in the
pool already. Rows of different lengths are packed one after the other.

A program takes one KV head and TILE_M consecutive rows of (token, query head of the group), so that K and V are read
once for a whole group and a tile spans few positions: little work is lost at the diagonal. Keys before the tile's
first position, in the window of its last, need no mask; the rest do. The host lists the tiles, longest first, so that
no long one starts last.
Where blocks are large enough, unmasked keys and values come through a tensor descriptor over the whole pool. A tile's
keys may be split between programs (`kernels/gpu/prompt_graphs`).

Reference: `windowed_attention` of `tests/kernels/helpers.py`.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu.attention.decode_tiles import LOG2_E, LOG2_E_IN_KERNEL, compute_dtype, tile_offsets
from kernels.gpu.attention.prompt_tiles import LARGE_TILE
from kernels.gpu.tuning import (
    PREFILL_BY_DESCRIPTOR,
    PREFILL_BY_POINTERS,
    PREFILL_WIDE_BY_DESCRIPTOR,
    PREFILL_WIDE_BY_POINTERS,
    PrefillConfig,
)

WIDE = 128  # dimensions of a head; more have settings of their own
BOX = 64  # keys that one copy of the descriptor brings


class TileSplits(Protocol):
    """Workspace for tiles whose keys are split among programs, and the merge of their results.

    outputs: float32, the output of each part in its slot. log_sums: float32, the log-sum-exp of its scores.
    """

    @property
    def outputs(self) -> Tensor: ...

    @property
    def log_sums(self) -> Tensor: ...

    def merge(self, out: Tensor, num_kv_heads: int, group: int, tile_m: int) -> None:
        """Write the tiles that are split to `out` (num_tokens, num_heads * head_dim)."""
        ...


@triton.jit
def _softmax_step(scores, highest, total, scale, MAY_SEE_NOTHING: tl.constexpr):
    """Compute the weights of a step's scores and update the softmax: (weights, shrink, highest, total).

    MAY_SEE_NOTHING: some row's scores may all be minus infinity, in the first step too.
    """
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    pivot = new_highest
    if MAY_SEE_NOTHING:
        pivot = tl.where(new_highest > float("-inf"), new_highest, 0.0)
    weights = tl.exp2(scores * scale - pivot[:, None])
    shrink = tl.exp2(highest - pivot)
    return weights, shrink, new_highest, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def _attend_boxes(
    q, mixed, total, highest, boxes, table_ptr, first_key, end_key, first_row, block_rows, value_rows, scale,
    BLOCK_SIZE: tl.constexpr, TILE_N: tl.constexpr, NUM_STAGES: tl.constexpr, MAY_SEE_NOTHING: tl.constexpr,
):  # fmt: skip
    """Add keys that all rows see to a tile's running softmax, up to end_key. boxes: the pool as rows of a head."""
    for first in tl.range(first_key, end_key, TILE_N, num_stages=NUM_STAGES):
        row = tl.load(table_ptr + first // BLOCK_SIZE) * block_rows + first_row + first % BLOCK_SIZE
        keys = boxes.load([row, 0]).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        weights, shrink, highest, total = _softmax_step(scores, highest, total, scale, MAY_SEE_NOTHING)
        values = boxes.load([row + value_rows, 0]).to(q.dtype)
        mixed = tl.dot(weights.to(q.dtype), values, mixed * shrink[:, None], input_precision="ieee")
    return mixed, total, highest


@triton.jit
def _attend_tile(
    q, mixed, total, highest, keys_ptr, values_ptr, table_ptr, positions, first_key, end_key, lowest_key,
    block_stride, scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add keys [first_key, end_key) to a tile's running softmax; without MASKED all rows see all of them.

    lowest_key: with a window the first that any row sees, else None.
    """
    dims = tl.arange(0, HEAD_DIM)
    for first in tl.range(first_key, end_key, TILE_N, num_stages=NUM_STAGES):
        offsets = tile_offsets(table_ptr, first, end_key, block_stride, BLOCK_SIZE, TILE_N, HEAD_DIM, lowest_key)
        keys = tl.load(keys_ptr + offsets[:, None] + dims[None, :]).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            tokens = first + tl.arange(0, TILE_N)
            sees = tokens[None, :] <= positions[:, None]
            exists = tokens < end_key
            if WINDOW > 0:
                sees = sees & (tokens[None, :] > positions[:, None] - WINDOW)
                exists = exists & (tokens >= lowest_key)
            scores = tl.where(sees, scores, float("-inf"))
            # Memory after the last key, or before the window, may hold NaN, and 0 * NaN is NaN.
            values = tl.load(values_ptr + offsets[:, None] + dims[None, :], mask=exists[:, None], other=0.0).to(
                q.dtype
            )
        else:
            values = tl.load(values_ptr + offsets[:, None] + dims[None, :]).to(q.dtype)
        weights, shrink, highest, total = _softmax_step(scores, highest, total, scale, WINDOW > 0)
        mixed = tl.dot(weights.to(q.dtype), values, mixed * shrink[:, None], input_precision="ieee")
    return mixed, total, highest


@triton.jit(do_not_specialize=["layer"])
def _paged_prefill_kernel(
    q_ptr, pool_ptr, boxes, tables_ptr, tiles_ptr, out_ptr, sinks_ptr, outputs_ptr, log_sums_ptr,
    layer, num_layers, q_stride, table_stride, block_stride, layer_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_BOXES: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SPLITS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    WIDTH: tl.constexpr = 7 if HAS_SPLITS else 4
    tile_ptr = tiles_ptr + tl.program_id(1) * WIDTH
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
    end_key = first_position + count
    lowest_key = None
    first_full = 0
    first_masked = num_full
    split_start = 0
    slot = 0
    if HAS_SPLITS:
        split_start = tl.load(tile_ptr + 4)
        end_key = tl.load(tile_ptr + 5)
        slot = tl.load(tile_ptr + 6)
        first_full = split_start
        first_masked = tl.maximum(num_full, split_start)
        num_full = tl.minimum(num_full, end_key)
    if WINDOW > 0:
        lowest_key = tl.maximum(first_position - WINDOW + 1, 0)
        lowest_of_last = tl.maximum(first_position + count - WINDOW, 0)
        end_partly = tl.minimum(tl.cdiv(lowest_of_last, TILE_N) * TILE_N, num_full)
        first_full = tl.maximum(end_partly, split_start)
        mixed, total, highest = _attend_tile(
            q, mixed, total, highest, keys_ptr, values_ptr, table_ptr, positions,
            tl.maximum(lowest_key // TILE_N * TILE_N, split_start), end_partly,
            lowest_key, block_stride, scale, True, HEAD_DIM, BLOCK_SIZE, TILE_N, 1, WINDOW,
        )  # fmt: skip
    if HAS_BOXES:
        value_rows: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE
        mixed, total, highest = _attend_boxes(
            q, mixed, total, highest, boxes, table_ptr, first_full, num_full,
            layer * (2 * value_rows) + kv_head * BLOCK_SIZE, num_layers * (2 * value_rows), value_rows,
            scale, BLOCK_SIZE, TILE_N, NUM_STAGES, WINDOW > 0,
        )  # fmt: skip
    else:
        mixed, total, highest = _attend_tile(
            q, mixed, total, highest, keys_ptr, values_ptr, table_ptr, positions, first_full, num_full, lowest_key,
            block_stride, scale, False, HEAD_DIM, BLOCK_SIZE, TILE_N, NUM_STAGES, WINDOW,
        )  # fmt: skip
    mixed, total, highest = _attend_tile(
        q, mixed, total, highest, keys_ptr, values_ptr, table_ptr, positions, first_masked, end_key,
        lowest_key, block_stride, scale, True, HEAD_DIM, BLOCK_SIZE, TILE_N, 1, WINDOW,
    )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E_IN_KERNEL
        if HAS_SPLITS:
            sink = tl.where(split_start == 0, sink, float("-inf"))
        new_highest = tl.maximum(highest, sink)
        pivot = tl.where(new_highest > float("-inf"), new_highest, 0.0)
        shrink = tl.exp2(highest - pivot)
        total = total * shrink + tl.exp2(sink - pivot)
        mixed = mixed * shrink[:, None]
        highest = new_highest
    mixed = mixed / tl.maximum(total, 1.0)[:, None]  # the highest score's weight is 1; a tile without tokens has none
    target = out_ptr + (tokens[:, None] * (NUM_KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
    if HAS_SPLITS:
        mine = ((slot - 1) * NUM_KV_HEADS + kv_head) * TILE_M + members
        tl.store(outputs_ptr + mine[:, None] * HEAD_DIM + dims[None, :], mixed, mask=(mine >= 0)[:, None])
        tl.store(log_sums_ptr + mine, highest + tl.log2(tl.maximum(total, 1.0)), mask=mine >= 0)
        exists = exists & (slot == 0)
    tl.store(target, mixed.to(out_ptr.dtype.element_ty), mask=exists)


def takes_boxes(pool: Tensor) -> bool:
    """Whether blocks can be copied through a tensor descriptor: by TMA, without threads or registers."""
    block_size, head_dim = pool.shape[4:]
    if block_size % BOX or pool.itemsize > 2 or pool.numel() // head_dim >= 2**31:
        return False
    return pool.device.type == "cpu" or torch.cuda.get_device_capability(pool.device) >= (9, 0)


def paged_prefill(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, tiles: Tensor, tile_m: int = LARGE_TILE,
    out: Tensor | None = None, config: PrefillConfig | None = None, has_boxes: bool | None = None, window: int = 0,
    sinks: Tensor | None = None, splits: TileSplits | None = None,
) -> Tensor:  # fmt: skip
    """Attend for the tokens in `tiles`. pool, block_tables, sinks: see `paged_decode`.

    q: (num_tokens, num_heads, head_dim), heads contiguous, tokens of any stride.
    tiles: int32 (num_tiles, 4), from `prefill_tiles` with the same tile_m.
    out: (num_tokens, num_heads * head_dim), contiguous; tokens in no tile are left as they are. Returns it.
    has_boxes: whether to load through a tensor descriptor; None: where that is possible.
    window: keys that a query sees, itself included; 0: all. Entries of tables before it are not read.
    splits: where tiles may be split, which are then int32 (num_tiles, 7): further first key, end key and slot, 0 of
        whole tiles.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_layers, _, num_kv_heads, block_size = pool.shape[1:5]
    if out is None:
        out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype, device=q.device)
    if tiles.shape[0] == 0:
        return out
    boxes = pool
    if has_boxes is None:
        has_boxes = takes_boxes(pool)
    if has_boxes:
        rows = pool.view(-1, head_dim)
        boxes = TensorDescriptor(rows, list(rows.shape), [head_dim, 1], [BOX, head_dim])
    if config is None and head_dim > WIDE:
        config = PREFILL_WIDE_BY_DESCRIPTOR if has_boxes else PREFILL_WIDE_BY_POINTERS
    table = PREFILL_BY_DESCRIPTOR if has_boxes else PREFILL_BY_POINTERS
    config = config or table.get(tile_m) or PrefillConfig(tile_m, 4, 2)
    outputs, log_sums = (out, out) if splits is None else (splits.outputs, splits.log_sums)
    group = num_heads // num_kv_heads
    _paged_prefill_kernel[(num_kv_heads, tiles.shape[0])](
        q, pool, boxes, block_tables, tiles, out, q if sinks is None else sinks, outputs, log_sums,
        layer, num_layers, q.stride(0), block_tables.stride(0), pool.stride(0), pool.stride(1),
        LOG2_E / math.sqrt(head_dim),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        TILE_M=tile_m, TILE_N=config.tile_n, NUM_STAGES=config.num_stages, COMPUTE=compute_dtype(q, pool),
        HAS_BOXES=has_boxes, WINDOW=window, HAS_SINKS=sinks is not None, HAS_SPLITS=splits is not None,
        num_warps=config.num_warps,
    )  # fmt: skip
    if splits is not None:
        splits.merge(out, num_kv_heads, group, tile_m)
    return out
