"""GEMVs of long rows, of which the ring holds few.

By chunks: a chunk of all tiles of a program at a time. By pairs: a chunk of two tiles at a time, with the vector in
registers. By pieces: a chunk of all tiles at a time, while the vector is received a piece at a time.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gpu.persistent.ll_protocol import ask_for_piece, receive_piece
from kernels.gpu.persistent.operand import LENGTH, SUMS, chunk_of, chunks_of, multiply, store_operand, sum_columns
from kernels.gpu.persistent.ring import DIMS, barrier, following, num_chunks, release, wait_for
from kernels.gpu.persistent.shape import HEAD_DIM, Shape


@triton.constexpr_function
def by_pieces(shape: Shape, k: int) -> bool:
    return shape.is_by_pieces(k)


@triton.constexpr_function
def num_pairs(shape: Shape, n: int) -> int:
    return (shape.tiles(n) + 1) // 2


@triton.constexpr_function
def chunks_at_once(shape: Shape, n: int, k: int, slices: int) -> int:
    return shape.chunks_at_once(n, k, slices * HEAD_DIM)


@gluon.jit
def _zeros(N: gl.constexpr, S: gl.constexpr, SHAPE: gl.constexpr):
    """Return zero sums for each of a program's pairs of tiles, see `multiply`."""
    acc = ()
    for _ in gl.static_range(num_pairs(SHAPE, N)):
        zeros = gl.zeros([S, 16, 8], gl.float32, SUMS)
        acc = acc + (zeros,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    return acc


@gluon.jit
def _add_chunk(
    acc, x, scales, chunk: gl.constexpr, N: gl.constexpr, K: gl.constexpr, smem, slot, phase, offset,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Add a chunk's products for all tiles to the sums of pairs. offset: of the chunk's first slot from `slot`."""
    SLOTS: gl.constexpr = SHAPE.value.slots
    LAST: gl.constexpr = (N // 8 - 1) // SHAPE.value.programs
    sums_now = ()
    for pair in gl.static_range(num_pairs(SHAPE, N)):
        one, _ = following(slot, phase, offset + 2 * pair, SLOTS)
        other, _ = following(slot, phase, offset + min(2 * pair + 1, LAST), SLOTS)
        scale = scales[pair * num_chunks(K, smem.shape[1]) + chunk] if len(scales) > 0 else 1.0
        y = multiply(x, smem.index(one), smem.index(other), scale)
        sums_now = sums_now + (acc[pair] + y,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    return sums_now


@gluon.jit
def _store_pairs(acc, N: gl.constexpr, sums, SHAPE: gl.constexpr):
    for pair in gl.static_range(num_pairs(SHAPE, N)):
        one, other = sum_columns(acc[pair])
        sums.index(2 * pair).store(one)
        if 2 * pair * SHAPE.value.programs + SHAPE.value.programs < N // 8:
            sums.index(2 * pair + 1).store(other)


@gluon.jit
def gemv_by_pairs(
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, operand, smem, ready, empty, sums, slot, phase,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Multiply a chunk of two tiles at a time, of gate and up if GATED; release its slots at once."""
    S: gl.constexpr = smem.shape[1]
    P: gl.constexpr = SHAPE.value.programs
    SLOTS: gl.constexpr = SHAPE.value.slots
    TILES: gl.constexpr = SHAPE.value.most_tiles
    num_tiles = (N // 8 - gl.program_id(0) + P - 1) // P * (2 if GATED else 1)
    x = chunks_of(operand, num_chunks(K, S), S)
    for begin in range(0, num_tiles, 2):
        count = gl.minimum(num_tiles - begin, 2)
        y = gl.zeros([S, 16, 8], gl.float32, SUMS)
        for chunk in gl.static_range(num_chunks(K, S)):
            wait_for(ready, slot, phase, count, SLOTS)
            other, _ = following(slot, phase, count - 1, SLOTS)
            y += multiply(x[chunk], smem.index(slot), smem.index(other), 1.0)
            slot, phase = following(slot, phase, count, SLOTS)
            barrier()  # every thread has read the chunk
            release(empty, slot, count, SLOTS)
        one, other = sum_columns(y)
        if GATED:
            sums.index(begin // 2).store(one)
            sums.index(begin // 2 + TILES).store(other)
        else:
            sums.index(begin).store(one)
            sums.index(begin + 1).store(other)  # without a second tile nobody reads it
    return slot, phase


@gluon.jit
def gemv_by_chunks(
    N: gl.constexpr, K: gl.constexpr, operand, scales, smem, ready, empty, sums, slot, phase, SHAPE: gl.constexpr
):
    """Multiply some chunks of all tiles at a time, so that x need not stay in registers."""
    S: gl.constexpr = smem.shape[1]
    P: gl.constexpr = SHAPE.value.programs
    SLOTS: gl.constexpr = SHAPE.value.slots
    CHUNKS: gl.constexpr = num_chunks(K, S)
    AT_ONCE: gl.constexpr = chunks_at_once(SHAPE, N, K, S)
    num_tiles = (N // 8 - gl.program_id(0) + P - 1) // P
    acc = _zeros(N, S, SHAPE)
    count = 0
    for begin in gl.static_range(0, CHUNKS, AT_ONCE):
        if begin > 0:
            barrier()  # every thread has read the chunks
            release(empty, slot, count, SLOTS)
        count = num_tiles * min(AT_ONCE, CHUNKS - begin)
        wait_for(ready, slot, phase, count, SLOTS)
        for i in gl.static_range(min(AT_ONCE, CHUNKS - begin)):
            x = chunk_of(operand, begin + i, S)
            acc = _add_chunk(acc, x, scales, begin + i, N, K, smem, slot, phase, i * num_tiles, SHAPE)
        slot, phase = following(slot, phase, count, SLOTS)
    _store_pairs(acc, N, sums, SHAPE)
    return slot, phase, count


@gluon.jit
def gemv_by_pieces(
    N: gl.constexpr, K: gl.constexpr, ptr, flag, operand, smem, ready, empty, sums, slot, phase, SHAPE: gl.constexpr
):
    """Multiply as `gemv` by a vector too long for shared memory, received from `ptr` a piece at a time."""
    S: gl.constexpr = smem.shape[1]
    P: gl.constexpr = SHAPE.value.programs
    SLOTS: gl.constexpr = SHAPE.value.slots
    IN_PIECE: gl.constexpr = LENGTH // (S * DIMS)
    num_tiles = (N // 8 - gl.program_id(0) + P - 1) // P
    acc = _zeros(N, S, SHAPE)
    asked = ask_for_piece(ptr, K, LENGTH)
    for first in range(0, num_chunks(K, S), IN_PIECE):
        begin = first * (S * DIMS)
        piece = receive_piece(asked, ptr + begin, flag, K - begin, LENGTH)
        next_begin = gl.minimum(begin + LENGTH, K - 4)
        asked = ask_for_piece(ptr + next_begin, K - next_begin, LENGTH)
        store_operand(piece, 0, operand)
        for i in range(gl.minimum(num_chunks(K, S) - first, IN_PIECE)):
            wait_for(ready, slot, phase, num_tiles, SLOTS)
            acc = _add_chunk(acc, chunk_of(operand, i, S), (), 0, N, K, smem, slot, phase, 0, SHAPE)
            slot, phase = following(slot, phase, num_tiles, SLOTS)
            barrier()  # every thread has read the chunk
            release(empty, slot, num_tiles, SLOTS)
    _store_pairs(acc, N, sums, SHAPE)
    return slot, phase, 0
