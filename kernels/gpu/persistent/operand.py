"""The vector x of a GEMV as a tensor-core operand in shared memory, and the multiplication by it.

Tensor cores multiply by 8 columns at a time, of which a vector needs one. So x is split into two columns, x rounded
to bfloat16 and the remainder: y is as exact as with 16 bits of mantissa in x.

One instruction converts two e4m3 numbers to float16; to bfloat16 it would take eight. So with e4m3 weights x is two
columns of float16, and each slice of K has its own scale, a power of two, since float16 has few exponents.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.gpu.persistent.ll_protocol import VECTOR, receive_vector
from kernels.gpu.persistent.ring import COLUMNS, DIMS, SLICES
from kernels.gpu.persistent.shape import CHUNK, PIECE, Shape

LENGTH = gl.constexpr(PIECE)
WIDTH = gl.constexpr(8)  # neighbouring numbers along K per thread
SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))  # (slices of K, rows of W, columns)
OF_W = gl.constexpr(gl.DotOperandLayout(0, SUMS, WIDTH))
OF_TILE = gl.constexpr(gl.DotOperandLayout(1, SUMS, WIDTH))  # (slices of K, DIMS, rows), as in OF_W
OF_X = gl.constexpr(gl.DotOperandLayout(1, SUMS, WIDTH))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@triton.constexpr_function
def has_short_vector(shape: Shape) -> bool:
    return shape.columns > CHUNK and any(k <= CHUNK for _, k, _, _ in shape.stages)


@gluon.jit
def allocate_operand(SHAPE: gl.constexpr):
    """Allocate shared memory for the longest vector, see `store_operand`.

    A vector of one chunk fills half a slot of e4m3. The other half is multiplied by zeros of W and must be finite.
    """
    NUMBER: gl.constexpr = gl.float16 if SHAPE.value.is_e4m3 else gl.bfloat16
    SIZE: gl.constexpr = SHAPE.value.columns
    PIECES: gl.constexpr = SHAPE.value.most_chunks * COLUMNS // SHAPE.value.columns
    highs = gl.allocate_shared_memory(NUMBER, [PIECES, SIZE], FLAT)
    lows = gl.allocate_shared_memory(NUMBER, [PIECES, SIZE], FLAT)
    scales = gl.allocate_shared_memory(gl.float32, [PIECES, SIZE // DIMS], FLAT)
    operand = highs, lows, scales
    if has_short_vector(SHAPE):
        store_operand(gl.zeros([COLUMNS], gl.float32, VECTOR), 1, operand)
    return operand


@gluon.jit
def _to_bfloat16(x):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _to_float16(x):
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def split_bfloat16(x):
    """Split float32 into two bfloat16: x rounded, and the remainder."""
    high = _to_bfloat16(x)
    return high, _to_bfloat16(x - high.to(gl.float32))


@gluon.jit
def _split_float16(x):
    """Split float32 within the range of float16 into two float16: x rounded, and the remainder."""
    high = _to_float16(x)
    return high, _to_float16(x - high.to(gl.float32))


@gluon.jit
def _in_columns(high, low, column):
    """Return `high` in column 0, `low` in column 1, and zeros in the others."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; and.b32 t, $1, $3; and.b32 $0, $2, $5; or.b32 $0, $0, t; }", "=&r,r,r,r,r,r,r",
        [high, low, gl.where(column == 0, -1, 0), gl.where(column == 1, -1, 0)], dtype=high.dtype, is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def _normalized(x, scales):
    """Scale x (COLUMNS,) by a power of two per slice, whose largest number becomes 2^14 or more; `scales` undo it."""
    of_slices = x.reshape([SLICES, DIMS])
    exponent = gl.max(gl.abs(of_slices), axis=1).to(gl.int32, bitcast=True) >> 23
    exponent = gl.maximum(exponent, 15)  # so that both powers of two are normal
    scales.store(((exponent - 14) << 23).to(gl.float32, bitcast=True))
    return (of_slices * ((268 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]).reshape([COLUMNS])


@gluon.jit
def _part(x, i, SIZE: gl.constexpr):
    """Return part i of SIZE numbers of shared memory; if parts are smaller than its rows, i must be a constant."""
    TIMES: gl.constexpr = x.shape[1] // SIZE
    part = x.index(i // TIMES)
    if TIMES > 1:
        part = part.slice(i % TIMES * SIZE, SIZE)
    return part


@gluon.jit
def store_operand(x, first, operand):
    """Store x, the vector from chunk `first` on with zeros after its end, split into pairs of 16-bit numbers.

    operand: shared memory for the rounded numbers and for the remainders (slots of W, their columns), and for the
    scales of float16 (slots of W, their slices).
    """
    highs, lows, scales = operand
    if first * COLUMNS >= highs.shape[0] * highs.shape[1]:
        pass
    elif x.shape[0] == COLUMNS:
        if highs.dtype == gl.float16:
            high, low = _split_float16(_normalized(x, _part(scales, first, SLICES)))
        else:
            high, low = split_bfloat16(x)
        _part(highs, first, COLUMNS).store(high)
        _part(lows, first, COLUMNS).store(low)
    else:
        one, other = x.reshape([2, x.shape[0] // 2]).permute((1, 0)).split()
        store_operand(one, first, operand)
        store_operand(other, first + x.shape[0] // 2 // COLUMNS, operand)


@gluon.jit
def receive_operand(ptr, flag, K: gl.constexpr, operand):
    """Receive a vector of K numbers that other programs store at `ptr`, and store it as the operand."""
    store_operand(receive_vector(ptr, flag, K, triton.next_power_of_2(K)), 0, operand)


@gluon.jit
def chunk_of(operand, i, S: gl.constexpr):
    """Load the part of the vector for slot i of a row of W: S slices (S, DIMS, 8), and their scales (S, 1, 1)."""
    highs, lows, scales = operand
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, OF_X)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 1)
    high = _part(highs, i, S * DIMS)._reinterpret(highs.dtype, [S, DIMS], FLAT2).load(gl.SliceLayout(2, OF_X))
    low = _part(lows, i, S * DIMS)._reinterpret(highs.dtype, [S, DIMS], FLAT2).load(gl.SliceLayout(2, OF_X))
    x = _in_columns(gl.expand_dims(high, 2), gl.expand_dims(low, 2), column)
    of_slices = 1.0
    if highs.dtype == gl.float16:
        scale = _part(scales, i, S).load(gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))
        of_slices = gl.expand_dims(gl.expand_dims(scale, 1), 2)
    return x, of_slices


@gluon.jit
def chunks_of(operand, COUNT: gl.constexpr, S: gl.constexpr):
    """Load the whole vector, for rows of W of COUNT slots, into registers."""
    x = ()
    for i in gl.static_range(COUNT):
        x = x + (chunk_of(operand, i, S),)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    return x


@gluon.jit
def multiply(x, one, other, scale):
    """Multiply 16 rows of W, two tiles, by both columns of x, with a sum for each slice of K: (slices of K, 16, 8).

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
def sum_columns(y):
    """Add up both columns of x, and the slices of each warp: (SLICES, 8) for each of the two tiles."""
    if y.shape[0] > SLICES:
        y = gl.sum(y.reshape([y.shape[0] // SLICES, SLICES, 16, 8]), axis=0)
    return gl.sum(y, axis=2).reshape([SLICES, 2, 8]).permute((0, 2, 1)).split()


@gluon.jit
def store_squares(x, squares):
    """Store each warp's sum of squares of its part of x in shared memory."""
    of_slices = gl.sum((x * x).reshape([x.shape[0] // COLUMNS, SLICES, DIMS]), axis=2)
    squares.store(gl.sum(of_slices, axis=0))


@gluon.jit
def inverse_root(squares, eps, K: gl.constexpr):
    """Return 1 / RMS of K numbers from the sums of `store_squares`."""
    everywhere: gl.constexpr = gl.BlockedLayout([8], [32], [8], [0])
    return gl.rsqrt(gl.sum(squares.load(everywhere), axis=0) / K + eps)
