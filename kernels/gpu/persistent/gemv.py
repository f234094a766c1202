"""GEMV of a program's rows of W in shared memory; each of 8 warps multiplies its own slices of K.

Tensor cores multiply 16 rows of W at a time, two tiles.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gpu.persistent.long_rows import gemv_by_chunks, gemv_by_pairs
from kernels.gpu.persistent.operand import SUMS, chunks_of, multiply, sum_columns
from kernels.gpu.persistent.ring import SLICES, barrier, following, num_chunks, order, release, wait_for
from kernels.gpu.persistent.shape import HEAD_DIM, Shape

ADDED = gl.constexpr(gl.BlockedLayout([1, 8, 1], [4, 1, 8], [8, 1, 1], [2, 1, 0]))  # (tiles, slices of K, rows of W)
FLAT3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def allocate_sums(SHAPE: gl.constexpr):
    """Allocate shared memory for the sums of tiles that `gemv` stores, separate for gate and up."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [2 * SHAPE.value.most_tiles, SLICES, 8], layout)


@triton.constexpr_function
def tiles_at_once(shape: Shape, n: int, k: int, times: int, slices: int) -> int:
    return shape.tiles_at_once(n, k, times, slices * HEAD_DIM)


@gluon.jit
def gemv(
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, operand, scales, smem, ready, empty, sums, slot, phase,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Multiply a program's tiles of W (N, K) by the vector; store each warp's sums in `sums`.

    GATED: W has as many rows of `up` after those of `gate`; their sums follow. operand: see `store_operand`. scales:
    of the program's slots of W, see `down_scales`, or an empty tuple. Returns the slot after the last one, its phase,
    and how many slots before it must still be released.
    """
    S: gl.constexpr = smem.shape[1]
    ORDER: gl.constexpr = order(SHAPE, N, K, 2 if GATED else 1)
    if ORDER == "chunks":
        slot, phase, count = gemv_by_chunks(N, K, operand, scales, smem, ready, empty, sums, slot, phase, SHAPE)
    elif ORDER == "pairs":
        slot, phase = gemv_by_pairs(N, K, GATED, operand, smem, ready, empty, sums, slot, phase, SHAPE)
        count = 0
    else:
        x = chunks_of(operand, num_chunks(K, S), S)
        slot, phase, count = _gemv_by_tiles(x, scales, N, K, GATED, smem, ready, empty, sums, slot, phase, SHAPE)
    return slot, phase, count


@gluon.jit
def _gemv_by_tiles(
    x, scales, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, smem, ready, empty, sums, slot, phase,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Multiply some tiles at a time, alternately of gate and up if GATED."""
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
    """Multiply tiles from `begin` on. Waits for all their slots first, so that instructions of tiles interleave."""
    S: gl.constexpr = smem.shape[1]
    SLOTS: gl.constexpr = SHAPE.value.slots
    CHUNKS: gl.constexpr = num_chunks(K, S)
    count = gl.minimum(num_tiles - begin, AT_ONCE) * CHUNKS
    wait_for(ready, slot, phase, count, SLOTS)
    found = ()
    for i in gl.static_range(0, AT_ONCE, 2):
        y = gl.zeros([S, 16, 8], gl.float32, SUMS)
        for chunk in gl.static_range(CHUNKS):  # each chunk has its own sum, so that none waits for another
            one, _ = following(slot, phase, i * CHUNKS + chunk, SLOTS)
            other, _ = following(slot, phase, min(i + 1, AT_ONCE - 1) * CHUNKS + chunk, SLOTS)
            scale = scales[i // 2 * CHUNKS + chunk] if len(scales) > 0 else 1.0
            y += multiply(x[chunk], smem.index(one), smem.index(other), scale)
        found = found + sum_columns(y)
    for i in gl.static_range(AT_ONCE):
        tile = begin + i
        sums.index(tile // TIMES + tile % TIMES * SHAPE.value.most_tiles).store(found[i])
    slot, phase = following(slot, phase, count, SLOTS)
    return slot, phase, count


@gluon.jit
def sum_slices(sums, IS_UP: gl.constexpr, SHAPE: gl.constexpr):
    """Add up the sums of all warps: (tiles, 8)."""
    TILES: gl.constexpr = SHAPE.value.most_tiles
    all_sums = sums._reinterpret(gl.float32, [2 * TILES, SLICES, 8], FLAT3)
    return gl.sum(all_sums.slice(TILES if IS_UP else 0, TILES).load(ADDED), axis=1)


@gluon.jit
def tile_numbers(SHAPE: gl.constexpr):
    """Return the indices of the program's tiles of a weight (tiles,); the last ones may be beyond its end."""
    tiles = gl.arange(0, SHAPE.value.most_tiles, gl.SliceLayout(1, gl.SliceLayout(1, ADDED)))
    return gl.program_id(0) + tiles * SHAPE.value.programs


@gluon.jit
def tile_rows(N: gl.constexpr, SHAPE: gl.constexpr):
    """Return the rows of W in the program's tiles (tiles, 8), and a mask of the rows that exist."""
    rows = tile_numbers(SHAPE)[:, None] * 8 + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, ADDED)))[None, :]
    return rows, rows < N
