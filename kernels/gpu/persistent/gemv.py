"""GEMV of the rows of W that a program has in shared memory.

Tensor cores multiply 16 rows at a time, of which a vector is one. So x is two rows, its bfloat16 and what that
leaves: y is as exact as with x of 16 bits of mantissa. 8 warps take a slice of K each.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.gpu.persistent.ll_protocol import receive_vector
from kernels.gpu.persistent.ring import COLUMNS, DIMS, SLICES, barrier, by_chunks, following, release, wait_for
from kernels.gpu.persistent.shape import PIECE, Shape

LENGTH = gl.constexpr(PIECE)
WIDTH = gl.constexpr(8)  # neighbours along K in a thread
SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))  # (slices of K, rows of x, rows of W)
OF_X = gl.constexpr(gl.DotOperandLayout(0, SUMS, WIDTH))
OF_W = gl.constexpr(gl.DotOperandLayout(1, SUMS, WIDTH))
ADDED = gl.constexpr(gl.BlockedLayout([1, 8, 1], [4, 1, 8], [8, 1, 1], [2, 1, 0]))  # (tiles, slices of K, rows of W)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@triton.constexpr_function
def tiles_at_once(shape: Shape, n: int, k: int, times: int) -> int:
    return shape.tiles_at_once(n, k, times)


@triton.constexpr_function
def chunks_at_once(shape: Shape, n: int, k: int) -> int:
    return shape.chunks_at_once(n, k)


@gluon.jit
def _to_bfloat16(x):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def split_bfloat16(x):
    """float32 as two bfloat16: x rounded, and what that leaves."""
    high = _to_bfloat16(x)
    return high, _to_bfloat16(x - high.to(gl.float32))


@gluon.jit
def _in_rows(high, low, row):
    """`high` in row 0, `low` in row 1, zeros in the others."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; and.b32 t, $1, $3; and.b32 $0, $2, $5; or.b32 $0, $0, t; }", "=&r,r,r,r,r,r,r",
        [high, low, gl.where(row == 0, -1, 0), gl.where(row == 1, -1, 0)], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def store_operand(x, first, highs, lows):
    """Numbers of a vector from chunk `first` on, of which each thread has a part, as both bfloat16."""
    if x.shape[0] == COLUMNS:
        high, low = split_bfloat16(x)
        highs.index(first).store(high)
        lows.index(first).store(low)
    else:
        one, other = x.reshape([2, x.shape[0] // 2]).permute((1, 0)).split()
        store_operand(one, first, highs, lows)
        store_operand(other, first + x.shape[0] // 2 // COLUMNS, highs, lows)


@gluon.jit
def receive_operand(ptr, flag, K: gl.constexpr, highs, lows):
    """A vector that other programs store, a piece at a time where it is long."""
    PADDED: gl.constexpr = triton.next_power_of_2(K)
    if PADDED <= 2 * LENGTH:
        store_operand(receive_vector(ptr, flag, K, PADDED), 0, highs, lows)
    else:
        for first in gl.static_range(0, K, LENGTH):
            piece = receive_vector(ptr + first, flag, min(K - first, LENGTH), LENGTH)
            store_operand(piece, first // COLUMNS, highs, lows)


@gluon.jit
def _operand(highs, lows, i):
    """Chunk i of the vector."""
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, OF_X)))
    row = gl.expand_dims(gl.expand_dims(row, 0), 2)
    high = highs.index(i)._reinterpret(gl.bfloat16, [SLICES, DIMS], FLAT2)
    low = lows.index(i)._reinterpret(gl.bfloat16, [SLICES, DIMS], FLAT2)
    high, low = high.load(gl.SliceLayout(1, OF_X)), low.load(gl.SliceLayout(1, OF_X))
    return _in_rows(gl.expand_dims(high, 1), gl.expand_dims(low, 1), row)


@gluon.jit
def gemv(
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, highs, lows, smem, ready, empty, sums, slot, phase,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """W (N, K) times the vector, for all tiles of a program; leave each slice's sums in `sums`.

    GATED: W has as many rows of `up` after those of `gate`; their sums follow. Returns the slot after the last one,
    its phase, and how many slots before it wait for their release.
    """
    if by_chunks(SHAPE, N, K) and not GATED:
        slot, phase, count = _gemv_by_chunks(N, K, highs, lows, smem, ready, empty, sums, slot, phase, SHAPE)
    else:
        x = ()
        for i in gl.static_range((K + COLUMNS - 1) // COLUMNS):
            x = x + (_operand(highs, lows, i),)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
        slot, phase, count = _gemv_by_tiles(x, N, K, GATED, smem, ready, empty, sums, slot, phase, SHAPE)
    return slot, phase, count


@gluon.jit
def _gemv_by_tiles(
    x, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, smem, ready, empty, sums, slot, phase,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Some tiles at a time. Those of gate and up take turns."""
    P: gl.constexpr = SHAPE.value.programs
    TIMES: gl.constexpr = 2 if GATED else 1
    TILES: gl.constexpr = (N // 8 + P - 1) // P * TIMES
    AT_ONCE: gl.constexpr = tiles_at_once(SHAPE, N, K, TIMES)
    num_tiles = (N // 8 - gl.program_id(0) + P - 1) // P * TIMES
    if AT_ONCE == TILES:
        slot, phase, count = _gemv_tiles(x, 0, num_tiles, AT_ONCE, K, TIMES, smem, ready, sums, slot, phase, SHAPE)
    else:
        count = 0
        for begin in range(0, num_tiles, AT_ONCE):
            if begin > 0:
                barrier()  # every thread has read the tiles
                release(empty, slot, count, SHAPE.value.slots)
            slot, phase, count = _gemv_tiles(
                x, begin, num_tiles, AT_ONCE, K, TIMES, smem, ready, sums, slot, phase, SHAPE
            )
    return slot, phase, count


@gluon.jit
def _gemv_tiles(
    x, begin, num_tiles, AT_ONCE: gl.constexpr, K: gl.constexpr, TIMES: gl.constexpr, smem, ready, sums, slot, phase,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Tiles from `begin` on. Waits come first: instructions of different tiles take turns."""
    SLOTS: gl.constexpr = SHAPE.value.slots
    CHUNKS: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    count = gl.minimum(num_tiles - begin, AT_ONCE) * CHUNKS
    wait_for(ready, slot, phase, count, AT_ONCE * CHUNKS, SLOTS)
    found = ()
    for i in gl.static_range(AT_ONCE):
        at, _ = following(slot, phase, i * CHUNKS, SLOTS)
        tile = _gemv_tile(x, K, smem, at, SLOTS)
        found = found + (tile,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    for i in gl.static_range(AT_ONCE):
        tile = begin + i
        sums.index(tile // TIMES + tile % TIMES * SHAPE.value.most_tiles).store(found[i])
    slot, phase = following(slot, phase, count, SLOTS)
    return slot, phase, count


@gluon.jit
def _gemv_tile(x, K: gl.constexpr, smem, slot, SLOTS: gl.constexpr):
    """8 rows of W times x: (SLICES, 8). A sum for each chunk, so that none waits for another."""
    y = gl.zeros([SLICES, 16, 8], gl.float32, SUMS)
    for i in gl.static_range((K + COLUMNS - 1) // COLUMNS):
        at, _ = following(slot, 0, i, SLOTS)
        zeros = gl.zeros([SLICES, 16, 8], gl.float32, SUMS)
        y += mma_v2(x[i], smem.index(at).permute((0, 2, 1)).load(OF_W), zeros)
    return gl.sum(y, axis=1)


@gluon.jit
def _gemv_by_chunks(
    N: gl.constexpr, K: gl.constexpr, highs, lows, smem, ready, empty, sums, slot, phase, SHAPE: gl.constexpr
):
    """All tiles of a chunk, then those of the next one: x need not stay in registers."""
    P: gl.constexpr = SHAPE.value.programs
    SLOTS: gl.constexpr = SHAPE.value.slots
    TILES: gl.constexpr = (N // 8 + P - 1) // P
    CHUNKS: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    AT_ONCE: gl.constexpr = chunks_at_once(SHAPE, N, K)
    num_tiles = (N // 8 - gl.program_id(0) + P - 1) // P
    acc = ()
    for _ in gl.static_range(TILES):
        zeros = gl.zeros([SLICES, 16, 8], gl.float32, SUMS)
        acc = acc + (zeros,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    count = 0
    for begin in gl.static_range(0, CHUNKS, AT_ONCE):
        if begin > 0:
            barrier()  # every thread has read the chunks
            release(empty, slot, count, SLOTS)
        count = num_tiles * min(AT_ONCE, CHUNKS - begin)
        wait_for(ready, slot, phase, count, TILES * min(AT_ONCE, CHUNKS - begin), SLOTS)
        for i in gl.static_range(min(AT_ONCE, CHUNKS - begin)):
            x = _operand(highs, lows, begin + i)
            sums_now = ()
            for tile in gl.static_range(TILES):
                at, _ = following(slot, phase, i * num_tiles + tile, SLOTS)
                zeros = gl.zeros([SLICES, 16, 8], gl.float32, SUMS)
                y = mma_v2(x, smem.index(at).permute((0, 2, 1)).load(OF_W), zeros)
                sums_now = sums_now + (acc[tile] + y,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
            acc = sums_now
        slot, phase = following(slot, phase, count, SLOTS)
    for tile in gl.static_range(TILES):
        sums.index(tile).store(gl.sum(acc[tile], axis=1))
    return slot, phase, count


@gluon.jit
def sum_slices(sums, IS_UP: gl.constexpr, SHAPE: gl.constexpr):
    """(tiles, 8) from what warps have left."""
    TILES: gl.constexpr = SHAPE.value.most_tiles
    all_sums = sums._reinterpret(gl.float32, [2 * TILES, SLICES, 8], FLAT3)
    return gl.sum(all_sums.slice(TILES if IS_UP else 0, TILES).load(ADDED), axis=1)


@gluon.jit
def tile_numbers(SHAPE: gl.constexpr):
    """The program's tiles of a weight, and numbers beyond (tiles,)."""
    tiles = gl.arange(0, SHAPE.value.most_tiles, gl.SliceLayout(1, gl.SliceLayout(1, ADDED)))
    return gl.program_id(0) + tiles * SHAPE.value.programs


@gluon.jit
def tile_rows(N: gl.constexpr, SHAPE: gl.constexpr):
    """Rows of W in the program's tiles (tiles, 8), and which there are."""
    rows = tile_numbers(SHAPE)[:, None] * 8 + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, ADDED)))[None, :]
    return rows, rows < N


@gluon.jit
def store_squares(x, squares):
    """Each warp's sum of squares of its part of x, in shared memory."""
    of_slices = gl.sum((x * x).reshape([x.shape[0] // COLUMNS, SLICES, DIMS]), axis=2)
    squares.store(gl.sum(of_slices, axis=0))


@gluon.jit
def inverse_root(squares, eps, K: gl.constexpr):
    """1 / RMS."""
    everywhere: gl.constexpr = gl.BlockedLayout([8], [32], [8], [0])
    return gl.rsqrt(gl.sum(squares.load(everywhere), axis=0) / K + eps)
