"""4-bit weights on their way to the tensor cores: unpacks words in registers and scales groups.

    int4    (q - 8) s + z    a pair (s, z) of bfloat16 per group; q in the mantissa, with 128's exponent, is 128 + q
    e2m1    q 2^(e - 127)    a byte e per group; the bits of q placed in a float16 are q 2^-14, also for denormals

Words, chunks and groups: `kernels/quantization/w4a16_gemm.py`, whose layout e2m1 shares
(`kernels/quantization/mxfp4.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Unpacks the four nibbles of two words, each pair to two bfloat16 128 + w.
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
# Unpacks the four numbers of two words, each pair to two float16 q 2^-14: sign in bit 15, the rest in bits 11 to 9.
UNPACK_E2M1 = tl.constexpr("""{
    .reg .b32 s, t;
    and.b32 $0, $4, 0x8E008E00;
    shl.b32 t, $4, 3;
    and.b32 $1, t, 0x8E008E00;
    shl.b32 t, $4, 6;
    and.b32 t, t, 0x0E000E00;
    shl.b32 s, $4, 1;
    lop3.b32 $2, s, 0x80008000, t, 0xEA;
    shl.b32 t, $4, 9;
    and.b32 t, t, 0x0E000E00;
    shl.b32 s, $4, 2;
    lop3.b32 $3, s, 0x80008000, t, 0xEA;
}""")


@triton.jit
def unpack_to_half(words, FORMAT: tl.constexpr):
    """Unpack to two bytes per number: 128 + w of int4, bfloat16; q 2^-14 of e2m1, float16."""
    if FORMAT == "int4":
        numbers = tl.inline_asm_elementwise(
            UNPACK_INT4, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        numbers = tl.inline_asm_elementwise(
            UNPACK_E2M1, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return numbers


@triton.jit
def unpack_plain(words, FORMAT: tl.constexpr):
    """Unpack to w of int4 or q 2^-14 of e2m1, float32: for the interpreter, which has no assembly."""
    bits = words.to(tl.int32)
    weights = ()
    for nibble in tl.static_range(4):
        if FORMAT == "int4":
            weight = ((bits >> 4 * nibble) & 15).to(tl.float32)
        else:
            SIGN: tl.constexpr = (
                15 if nibble == 0 else 12 if nibble == 1 else 16 - nibble
            )  # SHIFTS of kernels/quantization/mxfp4.py
            sign, others = (bits >> SIGN) & 1, (bits >> (9 - 3 * nibble)) & 7
            number = ((sign << 31) | (others << 22)).to(tl.float32, bitcast=True)
            weight = number * 5.192296858534828e33  # 2^112
        weights = weights + (weight,)  # type: ignore[assignment]  # noqa: RUF005
    return weights


@triton.jit
def scale_and_zero(pairs):
    """Unpack a group's pair to float32: a bfloat16 is the upper half of a float32."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def load_scales(scale_at, has_scale, FORMAT: tl.constexpr, GROUPS: tl.constexpr):
    """Load the scales of a chunk's GROUPS for `scale_of`: adjacent bytes of e2m1 as one word."""
    if FORMAT == "e2m1" and GROUPS > 1:
        WORD: tl.constexpr = tl.int32 if GROUPS == 4 else tl.int16
        stored = tl.load(scale_at.to(tl.pointer_type(WORD), bitcast=True), mask=has_scale, other=0).to(tl.int32)
    else:
        stored = scale_at
    return stored


@triton.jit
def scale_of(stored, group: tl.constexpr, has_scale, FORMAT: tl.constexpr, GROUPS: tl.constexpr):
    """Return one group's pair of int4, or exponent of e2m1."""
    if FORMAT == "e2m1" and GROUPS > 1:
        scale = (stored >> 8 * group) & 255
    else:
        scale = tl.load(stored + group, mask=has_scale, other=0)
    return scale


@triton.jit
def power_of_two(exponents):
    """Return 2^(e - 127) of bytes e, times the 2^14 that unpacked numbers lack; float32. No model has e above 240."""
    return ((exponents.to(tl.int32) + 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def as_compute(x, COMPUTE: tl.constexpr):
    """Convert a bfloat16 x to float16, if COMPUTE says so; infinities become the largest float16."""
    narrow = x
    if x.dtype != COMPUTE:
        narrow = tl.clamp(x.to(tl.float32), -65504.0, 65504.0).to(COMPUTE)
    return narrow


@triton.jit
def as_operand(x, FORMAT: tl.constexpr, COMPILED: tl.constexpr):
    """Convert x to the type of unpacked weights; to float32 if x is float32 or the kernel is interpreted."""
    if x.dtype == tl.float32 or not COMPILED:
        operand = x.to(tl.float32)
    elif FORMAT == "int4":
        operand = x.to(tl.bfloat16)
    else:
        operand = as_compute(x, tl.float16)
    return operand


@triton.jit
def split_row(x):
    """Split one row's x, (chunks, 4, words), by nibble: four tensors (chunks, words, 1)."""
    even, odd = tl.split(tl.reshape(tl.permute(x, (0, 2, 1)), (x.shape[0], x.shape[2], 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0[:, :, None], x1[:, :, None], x2[:, :, None], x3[:, :, None]


@triton.jit
def chunk_sums(
    total, words, x, scale_at, has_scale, none, FORMAT: tl.constexpr, GROUP: tl.constexpr, COMPILED: tl.constexpr
):
    """Add a chunk's products to `total`, or one chunk's per leading index: groups are summed exactly, then scaled.

    words: (..., columns, words of a chunk). x: for each of the four nibbles, (..., words, rows). scale_at: of the
    first group, (..., columns). none: zeros (..., columns, rows), float32.
    """
    BIAS: tl.constexpr = 136.0 if COMPILED else 8.0  # of the unpacked weights
    NIBBLES: tl.constexpr = GROUP // words.shape[len(words.shape) - 1]  # per group
    weights = unpack_to_half(words, FORMAT) if COMPILED else unpack_plain(words, FORMAT)
    OPERAND: tl.constexpr = as_operand(x[0], FORMAT, COMPILED).dtype
    ones = tl.full(words.shape, 1.0, OPERAND)
    GROUPS: tl.constexpr = 4 // NIBBLES
    scales = load_scales(scale_at, has_scale, FORMAT, GROUPS)
    for group in tl.static_range(GROUPS):
        sums = none
        dots = none
        for nibble in tl.static_range(group * NIBBLES, (group + 1) * NIBBLES):
            operand = as_operand(x[nibble], FORMAT, COMPILED)
            dots = tl.dot(weights[nibble].to(OPERAND), operand, dots, input_precision="ieee")
            if FORMAT == "int4":
                sums = tl.dot(ones, operand, sums, input_precision="ieee")
        stored = tl.expand_dims(scale_of(scales, group, has_scale, FORMAT, GROUPS), len(words.shape) - 1)
        if FORMAT == "int4":
            scale, zero = scale_and_zero(stored)
            total += scale * dots
            total += (zero - BIAS * scale) * sums
        else:
            total += power_of_two(stored) * dots
    return total


@triton.jit
def chunk_products(
    total, words, x, scale_at, has_scale, FORMAT: tl.constexpr, GROUP: tl.constexpr, COMPILED: tl.constexpr
):
    """Add a chunk's products to `total`, for many rows of x: weights are scaled and rounded first.

    words: (columns, words of a chunk). x, scale_at: as for `chunk_sums`.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if COMPILED and x[0].dtype != tl.float32 else tl.float32
    BIAS: tl.constexpr = 136.0 if COMPILED else 8.0
    NIBBLES: tl.constexpr = GROUP // words.shape[1]
    weights = unpack_to_half(words, FORMAT) if COMPILED else unpack_plain(words, FORMAT)
    GROUPS: tl.constexpr = 4 // NIBBLES
    scales = load_scales(scale_at, has_scale, FORMAT, GROUPS)
    for group in tl.static_range(GROUPS):
        stored = scale_of(scales, group, has_scale, FORMAT, GROUPS)[:, None]
        for nibble in tl.static_range(group * NIBBLES, (group + 1) * NIBBLES):
            weight = weights[nibble].to(tl.float32)
            if FORMAT == "int4":
                scale, zero = scale_and_zero(stored)
                weight = weight * scale + (zero - BIAS * scale)
            else:
                weight *= power_of_two(stored)
            total = tl.dot(weight.to(OPERAND), x[nibble].to(OPERAND), total, input_precision="ieee")
    return total
