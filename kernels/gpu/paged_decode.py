"""Decode attention over the paged KV pool on a GPU: one query per sequence, split over the sequence's keys.

For each head:  out = softmax(q K^T / sqrt(head_dim)) V  over the sequence's first `length` keys, or with a window
over the last of these; with a sink, one score without a value beside them.

The query heads that share a KV head fill the M of `tl.dot` (padded to 16), so K and V are read once. The grid is
(num_kv_heads, rows, num_splits) and depends on nothing but the batch bucket: lengths and block tables are read on
the device. A program takes an equal share of its sequence's tiles, from the window's first on; programs without a
share return. It reads the ids of its blocks before its loop, or in it, at the cost of half of the loop's stages.
Splits are combined by a second kernel (`kernels/gpu/kv_splits.py`); a sequence of one share is written directly.

Reference: `attend_sequence` of `kernels/paged_attention.py`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.fast_launch import FastLaunch
from kernels.gpu.kv_splits import MIN_SHARE, DecodeWorkspace, combine_splits, decode_config, num_splits
from kernels.gpu.launch import overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.launch_configs import DecodeConfig
from kernels.gpu.tuning import MAX_PREFETCH_ROWS, PREFETCHED_KEYS

LISTED_BLOCKS = tl.constexpr(64)  # ids that a program holds at a time
LOG2_E = 1.4426950408889634
LOG2_E_IN_KERNEL = tl.constexpr(LOG2_E)


def padded_group(group: int) -> int:
    """Query heads of a KV head, padded to the smallest M of `tl.dot`."""
    return max(16, 1 << (group - 1).bit_length())


@triton.jit
def tile_offsets(
    table_ptr, first_token, length, block_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, first_key=None,
):  # fmt: skip
    """Where the tile's tokens lie relative to a pointer at [block 0, layer, k or v, head]: (TILE,).

    first_key: table entries before its block are not read.
    """
    tokens = first_token + tl.arange(0, TILE)
    if BLOCK_SIZE >= TILE:
        block = tl.load(table_ptr + first_token // BLOCK_SIZE).to(tl.int64)
        offsets = block * block_stride + (first_token % BLOCK_SIZE + tl.arange(0, TILE)) * HEAD_DIM
    else:
        exists = tokens < length
        if first_key is not None:
            exists = exists & (tokens >= first_key)
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        offsets = blocks * block_stride + (tokens % BLOCK_SIZE) * HEAD_DIM
    return offsets


@triton.jit
def listed_blocks(table_ptr, first_block, length, BLOCK_SIZE: tl.constexpr):
    """Ids of LISTED_BLOCKS blocks, 0 behind the sequence."""
    blocks = first_block + tl.arange(0, LISTED_BLOCKS)
    return tl.load(table_ptr + blocks, mask=blocks * BLOCK_SIZE < length, other=0)


@triton.jit
def listed_offsets(
    ids, first_block, first_token, block_stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """`tile_offsets` of a tile inside one block, whose id is among `ids`."""
    place = first_token // BLOCK_SIZE - first_block
    block = tl.sum(tl.where(tl.arange(0, LISTED_BLOCKS) == place, ids, 0), axis=0).to(tl.int64)
    return block * block_stride + (first_token % BLOCK_SIZE + tl.arange(0, TILE)) * HEAD_DIM


@triton.jit
def _load_even_and_odd(values_ptr, offsets, mask, HEAD_DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """Rows of e4m3 as two matrices (rows, HEAD_DIM / 2) of COMPUTE: even and odd dimensions.

    Read as 16-bit words: the instruction that loads a transposed operand from shared memory moves no less, and single
    bytes would take 16 times as many.
    """
    words_ptr = values_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    word_offsets = (offsets // 2)[:, None] + tl.arange(0, HEAD_DIM // 2)[None, :]
    words = tl.load(words_ptr + word_offsets, mask=mask, other=0)
    even = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(COMPUTE)
    odd = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(COMPUTE)
    return even, odd


@triton.jit
def _attend_tiles(
    q, mixed, mixed_odd, total, highest, keys_ptr, values_ptr, table_ptr, ids, first_block, start, stop, length,
    first_key, block_stride, scale,
    IS_LISTED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Add tiles [start, stop) to a running softmax. IS_LISTED: `ids` are those of the blocks from first_block on.

    8-bit values: `mixed` holds the even dimensions, `mixed_odd` the others; else mixed_odd is passed through.
    """
    dims = tl.arange(0, HEAD_DIM)
    for tile in tl.range(start, stop, num_stages=NUM_STAGES):
        if IS_LISTED:
            offsets = listed_offsets(ids, first_block, tile * TILE, block_stride, BLOCK_SIZE, TILE, HEAD_DIM)
        else:
            offsets = tile_offsets(
                table_ptr, tile * TILE, length, block_stride, BLOCK_SIZE, TILE, HEAD_DIM, first_key
            )  # fmt: skip
        visible = tile * TILE + tl.arange(0, TILE) < length
        if first_key is not None:
            visible = visible & (tile * TILE + tl.arange(0, TILE) >= first_key)
        keys = tl.load(keys_ptr + offsets[:, None] + dims[None, :]).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        # Beyond the length, and in front of the window, a block holds whatever was there, and 0 * NaN is NaN: those
        # rows are read as zeros.
        if values_ptr.dtype.element_ty == tl.float8e4nv:
            values, odd = _load_even_and_odd(values_ptr, offsets, visible[:, None], HEAD_DIM, q.dtype)
            mixed_odd = tl.dot(weights.to(q.dtype), odd, mixed_odd * shrink[:, None], input_precision="ieee")
        else:
            values = tl.load(values_ptr + offsets[:, None] + dims[None, :], mask=visible[:, None], other=0.0)
            values = values.to(q.dtype)
        mixed = tl.dot(weights.to(q.dtype), values, mixed * shrink[:, None], input_precision="ieee")
        highest = new_highest
    return mixed, mixed_odd, total, highest


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
    base = 0
    if WINDOW > 0:
        first_key = tl.maximum(length - WINDOW, 0)
        base = first_key // TILE
    num_tiles = tl.cdiv(length, TILE) - base
    share = tl.maximum(tl.cdiv(num_tiles, num_splits), tl.cdiv(MIN_SHARE, TILE))
    num_used = tl.maximum(tl.cdiv(num_tiles, share), 1)
    keys_ptr = pool_ptr + layer.to(tl.int64) * layer_stride + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values_ptr = keys_ptr + NUM_KV_HEADS * (BLOCK_SIZE * HEAD_DIM)
    table_ptr = tables_ptr + row * table_stride
    first_tile = base + split * share
    end_tile = tl.minimum(first_tile + share, base + num_tiles)
    first_block = first_tile * TILE // BLOCK_SIZE
    ids = listed_blocks(table_ptr, first_block, length, BLOCK_SIZE)
    if AHEAD > 0:
        # Tables and all keys but the newest were there before the step: only q must be waited for.
        tokens = first_tile * TILE + tl.arange(0, AHEAD)
        tokens = tl.minimum(tokens, tl.maximum(tl.minimum(end_tile * TILE, length) - 1, 0))
        if WINDOW > 0:
            tokens = tl.maximum(tokens, first_key)
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < length, other=0).to(tl.int64)
        offsets = (blocks * block_stride + (tokens % BLOCK_SIZE) * HEAD_DIM)[:, None]
        offsets = offsets + tl.arange(0, HEAD_DIM // LINE)[None, :] * LINE
        prefetch(keys_ptr + offsets, True)
        prefetch(values_ptr + offsets, True)
    wait_for_predecessor(OVERLAPS)
    if split >= num_used:
        return

    members = tl.arange(0, PADDED)
    dims = tl.arange(0, HEAD_DIM)
    heads = kv_head * GROUP + members
    is_member = (members < GROUP)[:, None]
    q = tl.load(q_ptr + row * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=is_member, other=0.0)
    q = q.to(COMPUTE)

    highest = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    IS_8_BIT: tl.constexpr = pool_ptr.dtype.element_ty == tl.float8e4nv
    mixed = tl.zeros((PADDED, HEAD_DIM // 2 if IS_8_BIT else HEAD_DIM), tl.float32)
    mixed_odd = mixed  # with 8 bits, `mixed` holds the even dimensions
    if LISTS_BLOCKS and BLOCK_SIZE >= TILE:
        per_block: tl.constexpr = BLOCK_SIZE // TILE
        for block in tl.range(first_block, tl.cdiv(end_tile * TILE, BLOCK_SIZE), LISTED_BLOCKS):
            start = tl.maximum(block * per_block, first_tile)
            stop = tl.minimum((block + LISTED_BLOCKS) * per_block, end_tile)
            mixed, mixed_odd, total, highest = _attend_tiles(
                q, mixed, mixed_odd, total, highest, keys_ptr, values_ptr, table_ptr, ids, block, start, stop, length,
                first_key, block_stride, scale, True, HEAD_DIM, BLOCK_SIZE, TILE, NUM_STAGES,
            )  # fmt: skip
            ids = listed_blocks(table_ptr, block + LISTED_BLOCKS, length, BLOCK_SIZE)
    else:
        mixed, mixed_odd, total, highest = _attend_tiles(
            q, mixed, mixed_odd, total, highest, keys_ptr, values_ptr, table_ptr, ids, first_block, first_tile,
            end_tile, length, first_key, block_stride, scale, False, HEAD_DIM, BLOCK_SIZE, TILE, NUM_STAGES,
        )  # fmt: skip

    if HAS_SINKS:  # the first split's
        sink = tl.load(sinks_ptr + heads, mask=members < GROUP, other=0.0).to(tl.float32) * LOG2_E_IN_KERNEL
        sink = tl.where(split == 0, sink, float("-inf"))
        new_highest = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.exp2(sink - new_highest)
        mixed = mixed * shrink[:, None]
        mixed_odd = mixed_odd * shrink[:, None]
        highest = new_highest
    if IS_8_BIT:
        mixed = tl.reshape(tl.join(mixed, mixed_odd), (PADDED, HEAD_DIM))
    # A row of length 0 (padding of a bucket) gets zeros.
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    out_row = out_ptr + (row * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
    if num_used == 1:
        tl.store(
            out_row + members[:, None] * HEAD_DIM + dims[None, :], mixed.to(out_ptr.dtype.element_ty), mask=is_member
        )
    else:
        mine = ((row * NUM_KV_HEADS + kv_head) * GROUP + members) * num_splits + split
        tl.store(outputs_ptr + mine[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_member)
        tl.store(log_sums_ptr + mine, highest + tl.log2(total), mask=members < GROUP)


def compute_dtype(q: Tensor, pool: Tensor) -> tl.dtype:
    """What dots are computed in: q's type, but float16 for 8-bit K and V, which convert to it in one step."""
    if q.dtype == torch.float32:
        return tl.float32
    return tl.float16 if q.dtype == torch.float16 or pool.dtype == torch.float8_e4m3fn else tl.bfloat16


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
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    out = torch.empty(num_rows, num_heads * head_dim, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    group = num_heads // num_kv_heads
    config = config or decode_config(num_rows, num_kv_heads, group, pool.itemsize, head_dim)
    count = splits or num_splits(num_rows, num_kv_heads, q.device, config)
    if window and splits is None:
        count = min(count, window // MIN_SHARE.value + 2)  # a window's keys give no more programs a share
    if count > 1 and num_rows * num_heads * count > workspace.outputs.shape[0]:
        raise ValueError(f"the workspace is too small for {num_rows} rows in {count} splits")
    overlaps = overlaps_launches(q)
    _paged_decode_kernel[(num_kv_heads, num_rows, count)](
        q, pool, block_tables, lengths, out, workspace.outputs, workspace.log_sums, q if sinks is None else sinks,
        layer, count, q.stride(0), block_tables.stride(0), pool.stride(0), pool.stride(1),
        LOG2_E / math.sqrt(head_dim),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, PADDED=padded_group(group),
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=config.tile, NUM_STAGES=config.num_stages,
        COMPUTE=compute_dtype(q, pool), AHEAD=PREFETCHED_KEYS if overlaps and num_rows <= MAX_PREFETCH_ROWS else 0,
        LINE=min(128 // pool.itemsize, head_dim), LISTS_BLOCKS=config.lists_blocks, OVERLAPS=overlaps,
        WINDOW=window, HAS_SINKS=sinks is not None, num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    if count > 1:
        combine_splits(lengths, out, workspace, count, config.tile, window)
    return out
