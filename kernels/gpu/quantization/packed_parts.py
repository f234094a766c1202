"""Packed weights of 2 to 6 bits on their way to the tensor cores: converts one part of a chunk's words to bfloat16.

The bits of q in the mantissa, with the exponent of 128, are the bfloat16 128 + q. Two weights take a shift and a
logical operation, with high bits two of each. Words, parts, chunks and pairs:
`kernels/quantization/packed_weights.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.quantization.nibbles import scale_and_zero
from kernels.quantization.packed_weights import PACKINGS, PackedWeight


@triton.constexpr_function
def words_of(bits: int) -> int:
    """Return the words of a chunk."""
    return PACKINGS[bits].words


@triton.constexpr_function
def parts_of(bits: int) -> int:
    """Return the values of a word."""
    return PACKINGS[bits].parts


@triton.constexpr_function
def chunks_of(bits: int) -> int:
    """Return the chunks of a K step."""
    return PACKINGS[bits].chunks


@triton.constexpr_function
def high_bits_of(bits: int) -> int:
    return bits - PACKINGS[bits].low_bits


@triton.constexpr_function
def is_symmetric(bits: int) -> bool:
    return PACKINGS[bits].is_symmetric


@triton.constexpr_function
def middle_of(bits: int, is_compiled: bool) -> float:
    """Return what `unpack_chunk` adds to q - middle for weights with zeros."""
    return float((1 << bits - 1) + (128 if is_compiled else 0))


@triton.constexpr_function
def unpacking(bits: int, part: int, words: str, high: str, to: str) -> list[str]:
    """Return assembly that unpacks a part of two words to two bfloat16 128 + q in register `to`."""
    packing = PACKINGS[bits]
    low, width = packing.low_bits, bits - packing.low_bits
    up = low - width * part
    lines = [
        f"shr.u32 t, {words}, {part % packing.parts * low};",
        f"lop3.b32 {to}, t, 0x{((1 << low) - 1) * 0x00010001:08X}, 0x43004300, 0xEA;",
    ]
    if width:
        lines += [f"shl.b32 t, {high}, {up};" if up >= 0 else f"shr.u32 t, {high}, {-up};"]
        lines += [f"lop3.b32 {to}, t, 0x{((1 << width) - 1 << low) * 0x00010001:08X}, {to}, 0xEA;"]
    return lines


@triton.constexpr_function
def subtracting(bits: int, register: str) -> list[str]:
    """Return assembly that turns two bfloat16 128 + q into q - middle, exactly."""
    return [
        f"mov.b32 t, 0x{0x43004300 + (0x00010001 << bits - 1):08X};",
        f"sub.rn.bf16x2 {register}, {register}, t;",
    ]


@triton.constexpr_function
def unpacking_assembly(bits: int, chunk: int) -> str:
    """Return assembly that unpacks all parts of a chunk from a register of words and one of high bits."""
    parts = PACKINGS[bits].parts
    lines = [".reg .b32 t;"]
    for part in range(parts):
        lines += unpacking(bits, chunk * parts + part, f"${parts}", f"${parts + 1}", f"${part}")
        lines += subtracting(bits, f"${part}") if PACKINGS[bits].is_symmetric else []
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def unpacking_constraints(bits: int) -> str:
    return "=&r," * PACKINGS[bits].parts + ("r,r" if bits > PACKINGS[bits].low_bits else "r")


@triton.constexpr_function
def bfloat16s(count: int) -> tuple[tl.dtype, ...]:
    return (tl.bfloat16,) * count


@triton.constexpr_function
def dequantizing_assembly(bits: int, part: int) -> str:
    """Return assembly that dequantizes two weights from words $1, high bits $2 and pair $3."""
    lines = [".reg .b32 q, s, t;", *unpacking(bits, part, "$1", "$2", "q"), *subtracting(bits, "q")]
    if PACKINGS[bits].is_symmetric:
        lines += [f"prmt.b32 s, $3, $3, 0x{3232 if part % 2 else 1010};", "mul.rn.bf16x2 $0, q, s;"]
    else:
        lines += ["prmt.b32 s, $3, $3, 0x1010;", "prmt.b32 t, $3, $3, 0x3232;", "fma.rn.bf16x2 $0, q, s, t;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def plain_part(words, high, BITS: tl.constexpr, PART: tl.constexpr):
    """Return q of part PART of a step, int32: for the interpreter, which has no assembly."""
    LOW: tl.constexpr = 16 // parts_of(BITS)
    WIDTH: tl.constexpr = high_bits_of(BITS)
    values = (words.to(tl.int32) >> PART % parts_of(BITS) * LOW) & ((1 << LOW) - 1)
    if WIDTH > 0:
        values |= ((high.to(tl.int32) >> WIDTH * PART) & ((1 << WIDTH) - 1)) << LOW
    return values


@triton.jit
def unpack_chunk(words, high, BITS: tl.constexpr, CHUNK: tl.constexpr, COMPILED: tl.constexpr):
    """Unpack the parts of chunk CHUNK of a step, each like `words`: q - middle if symmetric, exact, else 128 + q.

    If interpreted: q in place of 128 + q, in float32. high: like `words`; any number if weights have no high bits.
    """
    PARTS: tl.constexpr = parts_of(BITS)
    if COMPILED:
        TEXT: tl.constexpr = unpacking_assembly(BITS, CHUNK)
        CONSTRAINTS: tl.constexpr = unpacking_constraints(BITS)
        if high_bits_of(BITS) == 0:
            parts = tl.inline_asm_elementwise(TEXT, CONSTRAINTS, [words], bfloat16s(PARTS), is_pure=True, pack=2)
        else:
            parts = tl.inline_asm_elementwise(
                TEXT, CONSTRAINTS, [words, high.to(tl.int16)], bfloat16s(PARTS), is_pure=True, pack=2
            )
    else:
        parts = ()
        for part in tl.static_range(CHUNK * PARTS, CHUNK * PARTS + PARTS):
            weights = plain_part(words, high, BITS, part).to(tl.float32)
            if is_symmetric(BITS):
                weights -= 1 << BITS - 1
            parts = parts + (weights,)  # noqa: RUF005
    return parts


@triton.jit
def dequantize_part(words, high, pairs, BITS: tl.constexpr, PART: tl.constexpr, COMPILED: tl.constexpr):
    """Dequantize part PART of a step, (columns, words), rounded once; float32 if interpreted.

    words, high: (columns, words). pairs: (columns, 1).
    """
    if COMPILED:
        TEXT: tl.constexpr = dequantizing_assembly(BITS, PART)
        other = words if high_bits_of(BITS) == 0 else high.to(tl.int16)
        weights = tl.inline_asm_elementwise(
            TEXT, "=r,r,r,r,r", [words, other, pairs], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        weights = (plain_part(words, high, BITS, PART) - (1 << BITS - 1)).to(tl.float32)
        lower, upper = scale_and_zero(pairs)
        if is_symmetric(BITS):
            weights *= upper if PART % 2 else lower
        else:
            weights = weights * lower + upper
    return weights


def check_packed(packed: PackedWeight) -> int:
    """Return the columns of a K step. Raises ValueError for columns or pairs that the kernels do not support."""
    step, least = packed.packing.step, packed.packing.words
    if packed.num_columns % step or packed.pair_columns < least:
        raise ValueError(
            f"{packed.num_columns} columns, {packed.pair_columns} to a pair: they take multiples of {step} and at "
            f"least {least}"
        )
    return step
