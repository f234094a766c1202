"""GEMV of the rows of W that a program has in shared memory.

Tensor cores multiply 16 rows at a time, of which a vector is one. So x is two rows, its bfloat16 and what that
leaves: y is as exact as with x of 16 bits of mantissa. 8 warps take a part of K each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.gpu.persistent.stream import COLUMNS, DIMS, PARTS, following, wait_for

WIDTH = gl.constexpr(8)  # neighbours along K in a thread
SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))  # (parts of K, rows of x, rows of W)
OF_X = gl.constexpr(gl.DotOperandLayout(0, SUMS, WIDTH))
OF_W = gl.constexpr(gl.DotOperandLayout(1, SUMS, WIDTH))
ADDED = gl.constexpr(gl.BlockedLayout([1, 8, 1], [4, 1, 8], [8, 1, 1], [2, 1, 0]))  # (tiles, parts of K, rows of W)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


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
def operands(x, K: gl.constexpr, highs, lows):
    """A vector of which each thread has a part, as an operand of each chunk of K, through shared memory."""
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, OF_X)))
    row = gl.expand_dims(gl.expand_dims(row, 0), 2)
    high, low = split_bfloat16(x)
    highs.slice(0, x.shape[0]).store(high)
    lows.slice(0, x.shape[0]).store(low)
    found = ()
    for i in gl.static_range((K + COLUMNS - 1) // COLUMNS):
        high = highs.slice(i * COLUMNS, COLUMNS)._reinterpret(gl.bfloat16, [PARTS, DIMS], FLAT2)
        low = lows.slice(i * COLUMNS, COLUMNS)._reinterpret(gl.bfloat16, [PARTS, DIMS], FLAT2)
        high, low = high.load(gl.SliceLayout(1, OF_X)), low.load(gl.SliceLayout(1, OF_X))
        chunk = _in_rows(gl.expand_dims(high, 1), gl.expand_dims(low, 1), row)
        found = found + (chunk,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    return found


@gluon.jit
def _gemv_tile(x, K: gl.constexpr, smem, slot, SLOTS: gl.constexpr):
    """8 rows of W times x: (PARTS, 8). A sum for each chunk, so that none waits for another."""
    y = gl.zeros([PARTS, 16, 8], gl.float32, SUMS)
    for i in gl.static_range((K + COLUMNS - 1) // COLUMNS):
        at, _ = following(slot, 0, i, SLOTS)
        zeros = gl.zeros([PARTS, 16, 8], gl.float32, SUMS)
        y += mma_v2(x[i], smem.index(at).permute((0, 2, 1)).load(OF_W), zeros)
    return gl.sum(y, axis=1)


@gluon.jit
def gemv_tiles(
    x, K: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, smem, ready, sums, slot, phase, SHAPE: gl.constexpr
):
    """All tiles of a program, N rows of W in all; leave the parts' sums in `sums`, with a gate those of `up` behind.

    Returns the slot after them, its phase, and how many there were. Waits come first: instructions of different tiles
    take turns.
    """
    P: gl.constexpr = SHAPE.value.programs
    SLOTS: gl.constexpr = SHAPE.value.slots
    SLOTS_OF_TILE: gl.constexpr = (2 if GATED else 1) * ((K + COLUMNS - 1) // COLUMNS)
    TILES: gl.constexpr = (N // 8 + P - 1) // P
    count = (N // 8 - gl.program_id(0) + P - 1) // P * SLOTS_OF_TILE
    wait_for(ready, slot, phase, count, TILES * SLOTS_OF_TILE, SLOTS)
    found = ()
    for i in gl.static_range(TILES):
        for half in gl.static_range(2 if GATED else 1):
            at, _ = following(slot, phase, i * SLOTS_OF_TILE + half * (SLOTS_OF_TILE // 2), SLOTS)
            tile = _gemv_tile(x, K, smem, at, SLOTS)
            found = found + (tile,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    for i in gl.static_range(TILES):
        if GATED:
            sums.index(i).store(found[2 * i])
            sums.index(SHAPE.value.most_tiles + i).store(found[2 * i + 1])
        else:
            sums.index(i).store(found[i])
    slot, phase = following(slot, phase, count, SLOTS)
    return slot, phase, count


@gluon.jit
def sum_parts(sums, IS_UP: gl.constexpr, SHAPE: gl.constexpr):
    """(tiles, 8) from what warps have left."""
    TILES: gl.constexpr = SHAPE.value.most_tiles
    all_sums = sums._reinterpret(gl.float32, [2 * TILES, PARTS, 8], FLAT3)
    return gl.sum(all_sums.slice(TILES if IS_UP else 0, TILES).load(ADDED), axis=1)


@gluon.jit
def tile_rows(N: gl.constexpr, SHAPE: gl.constexpr):
    """Rows of W in the program's tiles (tiles, 8), and which there are."""
    tiles = gl.arange(0, SHAPE.value.most_tiles, gl.SliceLayout(1, gl.SliceLayout(1, ADDED)))
    rows = gl.program_id(0) + tiles[:, None] * SHAPE.value.programs
    rows = rows * 8 + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, ADDED)))[None, :]
    return rows, rows < N


@gluon.jit
def store_squares(x, squares):
    """Each warp's sum of squares of its part of x, in shared memory."""
    parts = gl.sum((x * x).reshape([x.shape[0] // COLUMNS, PARTS, DIMS]), axis=2)
    squares.store(gl.sum(parts, axis=0))


@gluon.jit
def inverse_root(squares, eps, K: gl.constexpr):
    """1 / RMS."""
    everywhere: gl.constexpr = gl.BlockedLayout([8], [32], [8], [0])
    return gl.rsqrt(gl.sum(squares.load(everywhere), axis=0) / K + eps)
