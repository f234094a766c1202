"""Tiles of keys and values that decode attention loads, and the running softmax over them.

A tile is `TILE` consecutive keys and values of one KV head. Its block ids are read from the block table in the loop,
or 64 at a time before it. Values in e4m3 are loaded as two matrices, of even and odd dimensions, which have separate
sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import prefetch

LISTED_BLOCKS = tl.constexpr(64)  # ids that a program holds at a time
LOG2_E = 1.4426950408889634
LOG2_E_IN_KERNEL = tl.constexpr(LOG2_E)
LOWEST = tl.constexpr(-1e30)  # below any score, but finite: -inf minus -inf of a row that sees no key would be NaN


def padded_group(group: int) -> int:
    """Pad the query heads of a KV head to the smallest M of `tl.dot`."""
    return max(16, 1 << (group - 1).bit_length())


def compute_dtype(q: Tensor, pool: Tensor) -> tl.dtype:
    """Return the type of dots: that of q, but float16 for 8-bit K and V, which convert to it in one instruction."""
    if q.dtype == torch.float32:
        return tl.float32
    return tl.float16 if q.dtype == torch.float16 or pool.dtype == torch.float8_e4m3fn else tl.bfloat16


@triton.jit
def tile_offsets(
    table_ptr, first_token, length, block_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, first_key=None,
):  # fmt: skip
    """Return the offsets (TILE,) of a tile's tokens from a pointer at [block 0, layer, k or v, head].

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
    """Load the ids of LISTED_BLOCKS blocks; 0 after the end of the sequence."""
    blocks = first_block + tl.arange(0, LISTED_BLOCKS)
    return tl.load(table_ptr + blocks, mask=blocks * BLOCK_SIZE < length, other=0)


@triton.jit
def listed_offsets(
    ids, first_block, first_token, block_stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Return `tile_offsets` of a tile within one block, whose id is among `ids`."""
    place = first_token // BLOCK_SIZE - first_block
    block = tl.sum(tl.where(tl.arange(0, LISTED_BLOCKS) == place, ids, 0), axis=0).to(tl.int64)
    return block * block_stride + (first_token % BLOCK_SIZE + tl.arange(0, TILE)) * HEAD_DIM


@triton.jit
def prefetch_keys(
    keys_ptr, values_ptr, table_ptr, first_tile, end_tile, length, first_key, block_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Prefetch the first AHEAD keys and values of tiles [first_tile, end_tile), in lines of LINE numbers.

    The block table and all keys but the newest were in memory before the step.
    """
    tokens = first_tile * TILE + tl.arange(0, AHEAD)
    tokens = tl.minimum(tokens, tl.maximum(tl.minimum(end_tile * TILE, length) - 1, 0))
    if first_key is not None:
        tokens = tl.maximum(tokens, first_key)
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < length, other=0).to(tl.int64)
    offsets = (blocks * block_stride + (tokens % BLOCK_SIZE) * HEAD_DIM)[:, None]
    offsets = offsets + tl.arange(0, HEAD_DIM // LINE)[None, :] * LINE
    prefetch(keys_ptr + offsets, True)
    prefetch(values_ptr + offsets, True)


@triton.jit
def load_values(values_ptr, offsets, mask, HEAD_DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """Load rows of values as COMPUTE, zeros where mask (rows, 1) is not set.

    Returns even and odd dimensions of e4m3; of other types the same values twice. e4m3 is read as 16-bit words, the
    smallest that `ldmatrix` transposes; single bytes would take 16 times as many instructions.
    """
    if values_ptr.dtype.element_ty == tl.float8e4nv:
        words_ptr = values_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        word_offsets = (offsets // 2)[:, None] + tl.arange(0, HEAD_DIM // 2)[None, :]
        words = tl.load(words_ptr + word_offsets, mask=mask, other=0)
        values = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(COMPUTE)
        odd = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(COMPUTE)
    else:
        dims = tl.arange(0, HEAD_DIM)
        values = tl.load(values_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0).to(COMPUTE)
        odd = values
    return values, odd


@triton.jit
def weigh_keys(q, keys, visible, total, highest, scale):
    """Compute the weights of a tile's keys and update the running softmax: (weights, shrink, total, highest).

    visible: (1 or members, keys).
    """
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.sum(weights, axis=1)
    return weights, shrink, total, new_highest


@triton.jit
def _attend_tiles(
    q, mixed, mixed_odd, total, highest, keys_ptr, values_ptr, table_ptr, ids, first_block, start, stop, length,
    first_key, block_stride, scale,
    IS_LISTED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr, member_lengths=None,
):  # fmt: skip
    """Add tiles [start, stop) to a running softmax. IS_LISTED: `ids` has the blocks from first_block on."""
    dims = tl.arange(0, HEAD_DIM)
    IS_8_BIT: tl.constexpr = values_ptr.dtype.element_ty == tl.float8e4nv
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
        seen = visible[None, :]
        if member_lengths is not None:
            seen = (tile * TILE + tl.arange(0, TILE))[None, :] < member_lengths[:, None]
        weights, shrink, total, highest = weigh_keys(q, keys, seen, total, highest, scale)
        # After the last key and before the window a block may hold NaN, and 0 * NaN is NaN: these rows are read as
        # zeros.
        values, odd = load_values(values_ptr, offsets, visible[:, None], HEAD_DIM, q.dtype)
        weights = weights.to(q.dtype)
        if IS_8_BIT:
            mixed_odd = tl.dot(weights, odd, mixed_odd * shrink[:, None], input_precision="ieee")
        mixed = tl.dot(weights, values, mixed * shrink[:, None], input_precision="ieee")
    return mixed, mixed_odd, total, highest


@triton.jit
def attend_share(
    q, ids, keys_ptr, values_ptr, table_ptr, first_tile, end_tile, length, first_key, block_stride, scale,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_STAGES: tl.constexpr,
    LISTS_BLOCKS: tl.constexpr, member_lengths=None,
):  # fmt: skip
    """Compute the softmax over tiles [first_tile, end_tile), not normalized: (mixed, mixed_odd, total, highest).

    ids: of the first LISTED_BLOCKS blocks, loaded early. first_key: the first key in the window; None: no window.
    member_lengths: keys that each row of q sees, at most `length`; None: all see `length`. For a row that sees none
    of these tiles `mixed` and `total` are zeros.
    """
    PADDED: tl.constexpr = q.shape[0]
    IS_8_BIT: tl.constexpr = values_ptr.dtype.element_ty == tl.float8e4nv
    if member_lengths is None:
        highest = tl.full((PADDED,), float("-inf"), tl.float32)
    else:
        highest = tl.full((PADDED,), LOWEST, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    mixed = tl.zeros((PADDED, HEAD_DIM // 2 if IS_8_BIT else HEAD_DIM), tl.float32)
    mixed_odd = mixed  # with 8 bits, `mixed` holds the even dimensions
    first_block = first_tile * TILE // BLOCK_SIZE
    if LISTS_BLOCKS and BLOCK_SIZE >= TILE:
        per_block: tl.constexpr = BLOCK_SIZE // TILE
        for block in tl.range(first_block, tl.cdiv(end_tile * TILE, BLOCK_SIZE), LISTED_BLOCKS):
            start = tl.maximum(block * per_block, first_tile)
            stop = tl.minimum((block + LISTED_BLOCKS) * per_block, end_tile)
            mixed, mixed_odd, total, highest = _attend_tiles(
                q, mixed, mixed_odd, total, highest, keys_ptr, values_ptr, table_ptr, ids, block, start, stop, length,
                first_key, block_stride, scale, True, HEAD_DIM, BLOCK_SIZE, TILE, NUM_STAGES, member_lengths,
            )  # fmt: skip
            ids = listed_blocks(table_ptr, block + LISTED_BLOCKS, length, BLOCK_SIZE)
    else:
        mixed, mixed_odd, total, highest = _attend_tiles(
            q, mixed, mixed_odd, total, highest, keys_ptr, values_ptr, table_ptr, ids, first_block, first_tile,
            end_tile, length, first_key, block_stride, scale, False, HEAD_DIM, BLOCK_SIZE, TILE, NUM_STAGES,
            member_lengths,
        )  # fmt: skip
    return mixed, mixed_odd, total, highest
