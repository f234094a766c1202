"""Weights of 4 bits on their way to the matrix units: words are unpacked in registers, groups get their scale.

    int4    (q - 8) s + z    a pair (s, z) of bfloat16 a group; q under the exponent of 128 is the bfloat16 128 + q
    e2m1    q 2^(e - 127)    a byte e a group; the bits of q where a bfloat16 has them are q 2^-126, denormals too

Words, chunks and groups: `kernels/w4a16_gemm.py`, whose layout e2m1 shares (`kernels/mxfp4.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

# The four nibbles of two words, each pair as two bfloat16 128 + w.
UNPACK_INT4 = tl.constexpr("""{
    .reg .b32 t;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 t, $4, 4;
    lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 t, $4, 8;
    lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 t, $4, 12;
    lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA;
}""")
# The four nibbles of two words, each pair as two bfloat16: sign to bit 15, the others to bits 8 to 6, times 2^126.
UNPACK_E2M1 = tl.constexpr("""{
    .reg .b32 s, t, k, z;
    mov.b32 k, 0x7E807E80;
    mov.b32 z, 0x80008000;
    shl.b32 s, $4, 12;
    and.b32 s, s, 0x80008000;
    shl.b32 t, $4, 6;
    lop3.b32 t, t, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $0, t, k, z;
    shl.b32 s, $4, 8;
    and.b32 s, s, 0x80008000;
    shl.b32 t, $4, 2;
    lop3.b32 t, t, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $1, t, k, z;
    shl.b32 s, $4, 4;
    and.b32 s, s, 0x80008000;
    shr.u32 t, $4, 2;
    lop3.b32 t, t, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $2, t, k, z;
    and.b32 s, $4, 0x80008000;
    shr.u32 t, $4, 6;
    lop3.b32 t, t, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $3, t, k, z;
}""")


@triton.jit
def unpack_to_bfloat16(words, FORMAT: tl.constexpr):
    """The four nibbles, bfloat16: 128 + w of int4, e2m1 as it is."""
    return tl.inline_asm_elementwise(
        UNPACK_INT4 if FORMAT == "int4" else UNPACK_E2M1, "=&r,=&r,=&r,=&r,r", [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def unpack_plain(words, FORMAT: tl.constexpr):
    """w of the four nibbles, float32: for the interpreter, which knows no assembly."""
    weights = ()
    for nibble in tl.static_range(4):
        bits = (words.to(tl.int32) >> 4 * nibble) & 15
        if FORMAT == "int4":
            weight = bits.to(tl.float32)
        else:
            weight = (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        weights = weights + (weight,)  # type: ignore[assignment]  # noqa: RUF005
    return weights


@triton.jit
def scale_and_zero(pairs):
    """Both of a group, float32, from one word: bfloat16 is the upper half of a float32."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponents):
    """2^(e - 127), float32, of bytes e; zero of 0, whose power is below what a float32 holds in full."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def split_row(x):
    """One row's x, (chunks, 4, words) -> of the four nibbles, each (chunks, words, 1)."""
    even, odd = tl.split(tl.reshape(tl.permute(x, (0, 2, 1)), (x.shape[0], x.shape[2], 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0[:, :, None], x1[:, :, None], x2[:, :, None], x3[:, :, None]


@triton.jit
def load_one_row(x_at, has_x):
    """x of the four nibbles: one load for all. x_at: of the first, (chunks, 1, words)."""
    return split_row(tl.load(x_at + (tl.arange(0, 4) * x_at.shape[2])[None, :, None], mask=has_x, other=0.0))


@triton.jit
def chunk_sums(
    words, x, scale_at, has_scale, none, FORMAT: tl.constexpr, GROUP: tl.constexpr, COMPILED: tl.constexpr
):
    """Products of one chunk, or of one each in a leading dimension: exact sums of a group, which are then scaled.

    words: (..., columns, words of a chunk). x: of the four nibbles, (..., words, rows) each. scale_at: of the first
    group, (..., columns). none: zeros (..., columns, rows), float32.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if COMPILED and x[0].dtype != tl.float32 else tl.float32
    BIAS: tl.constexpr = 136.0 if COMPILED else 8.0  # of the unpacked weights
    NIBBLES: tl.constexpr = GROUP // words.shape[len(words.shape) - 1]  # of a group
    weights = unpack_to_bfloat16(words, FORMAT) if COMPILED else unpack_plain(words, FORMAT)
    ones = tl.full(words.shape, 1.0, OPERAND)
    total = none
    for group in tl.static_range(4 // NIBBLES):
        sums = none
        dots = none
        for nibble in tl.static_range(group * NIBBLES, (group + 1) * NIBBLES):
            dots = tl.dot(weights[nibble].to(OPERAND), x[nibble].to(OPERAND), dots, input_precision="ieee")
            if FORMAT == "int4":
                sums = tl.dot(ones, x[nibble].to(OPERAND), sums, input_precision="ieee")
        stored = tl.expand_dims(tl.load(scale_at + group, mask=has_scale, other=0), len(words.shape) - 1)
        if FORMAT == "int4":
            scale, zero = scale_and_zero(stored)
            total += scale * dots + (zero - BIAS * scale) * sums
        else:
            total += power_of_two(stored) * dots
    return total


@triton.jit
def chunk_products(
    total, words, x, scale_at, has_scale, FORMAT: tl.constexpr, GROUP: tl.constexpr, COMPILED: tl.constexpr
):
    """`total` and the products of one chunk, for many rows of x: weights are scaled, and rounded, first.

    words: (columns, words of a chunk). x, scale_at: as for `chunk_sums`.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if COMPILED and x[0].dtype != tl.float32 else tl.float32
    BIAS: tl.constexpr = 136.0 if COMPILED else 8.0
    NIBBLES: tl.constexpr = GROUP // words.shape[1]
    weights = unpack_to_bfloat16(words, FORMAT) if COMPILED else unpack_plain(words, FORMAT)
    for group in tl.static_range(4 // NIBBLES):
        stored = tl.load(scale_at + group, mask=has_scale, other=0)[:, None]
        for nibble in tl.static_range(group * NIBBLES, (group + 1) * NIBBLES):
            weight = weights[nibble].to(tl.float32)
            if FORMAT == "int4":
                scale, zero = scale_and_zero(stored)
                weight = weight * scale + (zero - BIAS * scale)
            else:
                weight *= power_of_two(stored)
            total = tl.dot(weight.to(OPERAND), x[nibble].to(OPERAND), total, input_precision="ieee")
    return total
