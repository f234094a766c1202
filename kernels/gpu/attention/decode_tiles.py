"""Tiles of keys and values that decode attention loads, and the running softmax over them.

A tile is `TILE` consecutive keys and values of one KV head. Where its tokens lie is read from the block table, in the
loop or, at once for 64 blocks, before it. Of e4m3, values come as two matrices of even and odd dimensions, and so do
the sums over them.
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
LOWEST = tl.constexpr(-1e30)  # below any score, and finite: where a row sees no key, nothing is -inf - -inf


def padded_group(group: int) -> int:
    """Query heads of a KV head, padded to the smallest M of `tl.dot`."""
    return max(16, 1 << (group - 1).bit_length())


def most_queries(group: int) -> int:
    """Queries of one row that a program attends for: as many as fit a tile of 16 heads, or 32 where those are few."""
    fit = 16 // group
    return fit if fit >= 4 else max(1, min(4, 32 // group))


def compute_dtype(q: Tensor, pool: Tensor) -> tl.dtype:
    """What dots are computed in: q's type, but float16 for 8-bit K and V, which convert to it in one step."""
    if q.dtype == torch.float32:
        return tl.float32
    return tl.float16 if q.dtype == torch.float16 or pool.dtype == torch.float8_e4m3fn else tl.bfloat16


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
    """Ids of LISTED_BLOCKS blocks, 0 after the sequence."""
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
def prefetch_keys(
    keys_ptr, values_ptr, table_ptr, first_tile, end_tile, length, first_key, block_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Ask for the first AHEAD keys and values of tiles [first_tile, end_tile), in lines of LINE numbers.

    Tables and all keys but the newest were there before the step.
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
def load_values(values_ptr, offsets, mask, HEAD_DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """Rows of values as COMPUTE, zeros where mask (rows, 1) is not set: of e4m3 even and odd dimensions, else twice
    the same.
    """
    if values_ptr.dtype.element_ty == tl.float8e4nv:
        values, odd = _load_even_and_odd(values_ptr, offsets, mask, HEAD_DIM, COMPUTE)
    else:
        dims = tl.arange(0, HEAD_DIM)
        values = tl.load(values_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0).to(COMPUTE)
        odd = values
    return values, odd


@triton.jit
def weigh_keys(q, keys, visible, total, highest, scale):
    """Weights of a tile's keys, and the running maximum and sum with them: (weights, shrink, total, highest).

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
def add_values(weights, shrink, values, odd, mixed, mixed_odd, IS_8_BIT: tl.constexpr):
    """The running sums with a tile's values. mixed_odd: of 8 bits alone, else passed through."""
    if IS_8_BIT:
        mixed_odd = tl.dot(weights.to(odd.dtype), odd, mixed_odd * shrink[:, None], input_precision="ieee")
    mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee")
    return mixed, mixed_odd


@triton.jit
def _attend_tiles(
    q, mixed, mixed_odd, total, highest, keys_ptr, values_ptr, table_ptr, ids, first_block, start, stop, length,
    first_key, block_stride, scale,
    IS_LISTED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr, member_lengths=None,
):  # fmt: skip
    """Add tiles [start, stop) to a running softmax. IS_LISTED: `ids` are those of the blocks from first_block on."""
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
        # Beyond the length, and in front of the window, a block holds whatever was there, and 0 * NaN is NaN: those
        # rows are read as zeros.
        values, odd = load_values(values_ptr, offsets, visible[:, None], HEAD_DIM, q.dtype)
        mixed, mixed_odd = add_values(weights, shrink, values, odd, mixed, mixed_odd, IS_8_BIT)
    return mixed, mixed_odd, total, highest


@triton.jit
def attend_share(
    q, ids, keys_ptr, values_ptr, table_ptr, first_tile, end_tile, length, first_key, block_stride, scale,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_STAGES: tl.constexpr,
    LISTS_BLOCKS: tl.constexpr, member_lengths=None,
):  # fmt: skip
    """Running softmax of tiles [first_tile, end_tile): (mixed, mixed_odd, total, highest), before any division.

    ids: of the first LISTED_BLOCKS blocks, read ahead. first_key: with a window the first that is seen, else None.
    member_lengths: keys that each row of q sees, at most `length`; None: all see `length`. A row that sees none of
    these tiles gets zeros as `mixed` and `total`.
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
