"""GEMV of the rows of W that a program has in shared memory: 8 warps take slices of K each.

Tensor cores multiply 16 rows of W at a time, two tiles.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.gpu.persistent.operand import SUMS, WIDTH, chunk_of
from kernels.gpu.persistent.ring import DIMS, SLICES, barrier, by_chunks, following, num_chunks, release, wait_for
from kernels.gpu.persistent.shape import HEAD_DIM, Shape

OF_W = gl.constexpr(gl.DotOperandLayout(0, SUMS, WIDTH))
OF_TILE = gl.constexpr(gl.DotOperandLayout(1, SUMS, WIDTH))  # (slices of K, DIMS, rows), as in OF_W
ADDED = gl.constexpr(gl.BlockedLayout([1, 8, 1], [4, 1, 8], [8, 1, 1], [2, 1, 0]))  # (tiles, slices of K, rows of W)
FLAT3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@triton.constexpr_function
def tiles_at_once(shape: Shape, n: int, k: int, times: int, slices: int) -> int:
    return shape.tiles_at_once(n, k, times, slices * HEAD_DIM)


@triton.constexpr_function
def chunks_at_once(shape: Shape, n: int, k: int, slices: int) -> int:
    return shape.chunks_at_once(n, k, slices * HEAD_DIM)


@gluon.jit
def _multiply(x, one, other, scale):
    """What each slice of K adds to 16 rows of W, of two tiles, for both columns of x: (slices of K, 16, 8).

    x: see `chunk_of`. one, other: slots. scale: of the rows and slices, or 1.
    """
    numbers, of_slices = x
    S: gl.constexpr = numbers.shape[0]
    one = one.permute((0, 2, 1)).load(OF_TILE).to(numbers.dtype)
    other = other.permute((0, 2, 1)).load(OF_TILE).to(numbers.dtype)
    rows = gl.convert_layout(
        gl.join(one, other).permute((0, 3, 2, 1)).reshape([S, 16, DIMS]), OF_W, assert_trivial=True
    )
    y = mma_v2(rows, numbers, gl.zeros([S, 16, 8], gl.float32, SUMS))
    if numbers.dtype == gl.float16:
        y *= of_slices * scale
    return y


@gluon.jit
def _sum_columns(y):
    """Add up both columns of x, and the slices of each warp: (SLICES, 8) of each tile."""
    if y.shape[0] > SLICES:
        y = gl.sum(y.reshape([y.shape[0] // SLICES, SLICES, 16, 8]), axis=0)
    return gl.sum(y, axis=2).reshape([SLICES, 2, 8]).permute((0, 2, 1)).split()


@gluon.jit
def gemv(
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, operand, scales, smem, ready, empty, sums, slot, phase,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """W (N, K) times the vector, for all tiles of a program; leave each slice's sums in `sums`.

    GATED: W has as many rows of `up` after those of `gate`; their sums follow. operand: see `store_operand`. scales:
    of each of the program's slots of W, where they differ by columns, or an empty tuple. Returns the slot after the
    last one, its phase, and how many slots before it wait for their release.
    """
    S: gl.constexpr = smem.shape[1]
    if by_chunks(SHAPE, N, K) and not GATED:
        slot, phase, count = _gemv_by_chunks(N, K, operand, scales, smem, ready, empty, sums, slot, phase, SHAPE)
    else:
        x = ()
        for i in gl.static_range(num_chunks(K, S)):
            x = x + (chunk_of(operand, i, S),)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
        slot, phase, count = _gemv_by_tiles(x, scales, N, K, GATED, smem, ready, empty, sums, slot, phase, SHAPE)
    return slot, phase, count


@gluon.jit
def _gemv_by_tiles(
    x, scales, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, smem, ready, empty, sums, slot, phase,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Some tiles at a time. Those of gate and up take turns."""
    S: gl.constexpr = smem.shape[1]
    P: gl.constexpr = SHAPE.value.programs
    TIMES: gl.constexpr = 2 if GATED else 1
    TILES: gl.constexpr = (N // 8 + P - 1) // P * TIMES
    AT_ONCE: gl.constexpr = tiles_at_once(SHAPE, N, K, TIMES, S)
    num_tiles = (N // 8 - gl.program_id(0) + P - 1) // P * TIMES
    if AT_ONCE == TILES:
        slot, phase, count = _gemv_tiles(
            x, scales, 0, num_tiles, AT_ONCE, K, TIMES, smem, ready, sums, slot, phase, SHAPE
        )
    else:
        count = 0
        for begin in range(0, num_tiles, AT_ONCE):
            if begin > 0:
                barrier()  # every thread has read the tiles
                release(empty, slot, count, SHAPE.value.slots)
            slot, phase, count = _gemv_tiles(
                x, (), begin, num_tiles, AT_ONCE, K, TIMES, smem, ready, sums, slot, phase, SHAPE
            )
    return slot, phase, count


@gluon.jit
def _gemv_tiles(
    x, scales, begin, num_tiles, AT_ONCE: gl.constexpr, K: gl.constexpr, TIMES: gl.constexpr, smem, ready, sums, slot,
    phase, SHAPE: gl.constexpr,
):  # fmt: skip
    """Tiles from `begin` on. The wait comes first: instructions of different tiles take turns."""
    S: gl.constexpr = smem.shape[1]
    SLOTS: gl.constexpr = SHAPE.value.slots
    CHUNKS: gl.constexpr = num_chunks(K, S)
    count = gl.minimum(num_tiles - begin, AT_ONCE) * CHUNKS
    wait_for(ready, slot, phase, count, SLOTS)
    found = ()
    for i in gl.static_range(0, AT_ONCE, 2):
        y = gl.zeros([S, 16, 8], gl.float32, SUMS)
        for chunk in gl.static_range(CHUNKS):  # a sum for each, so that none waits for another
            one, _ = following(slot, phase, i * CHUNKS + chunk, SLOTS)
            other, _ = following(slot, phase, min(i + 1, AT_ONCE - 1) * CHUNKS + chunk, SLOTS)
            scale = scales[i // 2 * CHUNKS + chunk] if len(scales) > 0 else 1.0
            y += _multiply(x[chunk], smem.index(one), smem.index(other), scale)
        found = found + _sum_columns(y)
    for i in gl.static_range(AT_ONCE):
        tile = begin + i
        sums.index(tile // TIMES + tile % TIMES * SHAPE.value.most_tiles).store(found[i])
    slot, phase = following(slot, phase, count, SLOTS)
    return slot, phase, count


@gluon.jit
def _gemv_by_chunks(
    N: gl.constexpr, K: gl.constexpr, operand, scales, smem, ready, empty, sums, slot, phase, SHAPE: gl.constexpr
):
    """All tiles of a chunk, then those of the next one: x need not stay in registers."""
    S: gl.constexpr = smem.shape[1]
    P: gl.constexpr = SHAPE.value.programs
    SLOTS: gl.constexpr = SHAPE.value.slots
    TILES: gl.constexpr = (N // 8 + P - 1) // P
    CHUNKS: gl.constexpr = num_chunks(K, S)
    AT_ONCE: gl.constexpr = chunks_at_once(SHAPE, N, K, S)
    num_tiles = (N // 8 - gl.program_id(0) + P - 1) // P
    acc = ()
    for _ in gl.static_range(0, TILES, 2):
        zeros = gl.zeros([S, 16, 8], gl.float32, SUMS)
        acc = acc + (zeros,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    count = 0
    for begin in gl.static_range(0, CHUNKS, AT_ONCE):
        if begin > 0:
            barrier()  # every thread has read the chunks
            release(empty, slot, count, SLOTS)
        count = num_tiles * min(AT_ONCE, CHUNKS - begin)
        wait_for(ready, slot, phase, count, SLOTS)
        for i in gl.static_range(min(AT_ONCE, CHUNKS - begin)):
            x = chunk_of(operand, begin + i, S)
            sums_now = ()
            for pair in gl.static_range((TILES + 1) // 2):
                one, _ = following(slot, phase, i * num_tiles + 2 * pair, SLOTS)
                other, _ = following(slot, phase, i * num_tiles + min(2 * pair + 1, TILES - 1), SLOTS)
                scale = scales[pair * CHUNKS + begin + i] if len(scales) > 0 else 1.0
                y = _multiply(x, smem.index(one), smem.index(other), scale)
                sums_now = sums_now + (acc[pair] + y,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
            acc = sums_now
        slot, phase = following(slot, phase, count, SLOTS)
    for pair in gl.static_range((TILES + 1) // 2):
        one, other = _sum_columns(acc[pair])
        sums.index(2 * pair).store(one)
        if 2 * pair + 1 < TILES:
            sums.index(2 * pair + 1).store(other)
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
