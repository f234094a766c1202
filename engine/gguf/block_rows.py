"""GGUF weights of 2 to 6 bits: blocks of Q4_0, Q4_1 and Q2_K to Q6_K, without requantization.

A block of Q4_0 or Q4_1 is 32 weights of one row. Q4_0: float16 d, then 16 bytes of values; w = d (value - 8). Q4_1:
float16 d and m, then the values; w = d value + m. Byte i holds value i in its low half and value i + 16 in its high
half. A superblock of Q4_K is 8 groups of 32: float16 d and dmin, 12 bytes with 6 bits of a scale s and of a minimum m
for each group, then 32 bytes for every two groups, the first in the low halves; w = d s value - dmin m. Q5_K has 32
more bytes before the values, of which bit g is the fifth bit of group g. A superblock of Q6_K is 16 groups of 16: 128
bytes of four low bits, each 64 of them 64 values in the low and 64 in the high halves, 64 bytes of two high bits, the
int8 scales s, and float16 d; w = d s (value - 32).

Superblocks of Q2_K and Q3_K are 16 groups of 16, too. 64 bytes hold two bits of each value: bits 2 i and 2 i + 1 of
the first 32 bytes are of values 32 i to 32 i + 31, and so on for the second half. Q2_K: 16 bytes with a scale s in
the low and a minimum m in the high half, the values, float16 d and dmin; w = d s value - dmin m. Q3_K: 32 bytes
before the values, of which bit i is the third bit of values 32 i to 32 i + 31, and after the values 12 bytes of 6-bit
scales, and d; w = d (s - 32) (value - 4).

Scales and offsets are rounded to bfloat16 (`engine/quantization/int4.py`). This moves weights of Q4_0 and Q4_1 by at
most a few hundredths of a step, and those of Q4_K by 0.2% (rms, Qwen2.5-Coder-0.5B and Gemma-3-270M in Q4_K_M), where
int8 with a scale per row moves them by 0.9 to 2.6%.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quantization.int4 import GROUP_SIZE, as_bfloat16
from engine.quantization.quantized_rows import INT4_MIDDLE, QuantizedRows

Q4_0, Q4_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = 2, 3, 10, 11, 12, 13, 14  # ggml's type numbers
BLOCK_BYTES = {Q4_0: 18, Q4_1: 20, Q2_K: 84, Q3_K: 110, Q4_K: 144, Q5_K: 176, Q6_K: 210}
BITS = {Q4_0: 4, Q4_1: 4, Q2_K: 2, Q3_K: 3, Q4_K: 4, Q5_K: 5, Q6_K: 6}


def block_rows(raw: Tensor, type_id: int) -> QuantizedRows:
    """Make rows of a tensor's bytes. raw: uint8 (rows, blocks * block bytes), of one of these types."""
    blocks, bits = raw.view(raw.shape[0], -1, BLOCK_BYTES[type_id]), BITS[type_id]
    if type_id in OF_16:
        return OF_16[type_id](blocks)
    if type_id in (Q4_K, Q5_K):
        values, scales, minima = _superblocks(blocks)
        offsets = (1 << bits - 1) * scales - minima
    else:
        num_halves = BLOCK_BYTES[type_id] - 16
        halves = _float16(blocks[..., :num_halves])
        values = _bits(blocks[..., num_halves:], 4)
        scales = halves[..., 0]
        offsets = halves[..., 1] + INT4_MIDDLE * scales if type_id == Q4_1 else torch.zeros_like(scales)
    return QuantizedRows(values.flatten(1), as_bfloat16(scales), as_bfloat16(offsets), GROUP_SIZE, bits=bits)


def _superblocks(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values of Q4_K or Q5_K, and scales and minima, each (rows, groups)."""
    halves = _float16(blocks[..., :4])
    a, b, c = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]  # c: the low bits of the last four groups
    scales = torch.cat([a & 63, c & 15 | a >> 6 << 4], dim=-1)
    minima = torch.cat([b & 63, c >> 4 | b >> 6 << 4], dim=-1)
    values = _bits_of_runs(blocks[..., -128:], 32, 4)
    if blocks.shape[-1] == BLOCK_BYTES[Q5_K]:
        values |= _bits(blocks[..., 16:48], 1) << 4
    return values, (halves[..., :1] * scales).flatten(1), (halves[..., 1:] * minima).flatten(1)


def _q6_rows(blocks: Tensor) -> QuantizedRows:
    values = _bits_of_runs(blocks[..., :128], 64, 4) | _bits_of_runs(blocks[..., 128:192], 32, 2) << 4
    scales = _float16(blocks[..., 208:]) * blocks[..., 192:208].view(torch.int8)
    return _rows_of_16(values, scales, None, 6)


def _q3_rows(blocks: Tensor) -> QuantizedRows:
    values = _bits_of_runs(blocks[..., 32:96], 32, 2) | _bits(blocks[..., :32], 1) << 2
    low, high = _bits(blocks[..., 96:104], 4), _bits(blocks[..., 104:108], 2)
    scales = _float16(blocks[..., 108:]) * ((low | high << 4).short() - 32)
    return _rows_of_16(values, scales, None, 3)


def _q2_rows(blocks: Tensor) -> QuantizedRows:
    halves, packed = _float16(blocks[..., 80:]), blocks[..., :16]
    scales = halves[..., :1] * (packed & 15)
    return _rows_of_16(
        _bits_of_runs(blocks[..., 16:80], 32, 2), scales, 2 * scales - halves[..., 1:] * (packed >> 4), 2
    )


OF_16 = {Q2_K: _q2_rows, Q3_K: _q3_rows, Q6_K: _q6_rows}  # blocks with groups of 16 columns


def _rows_of_16(values: Tensor, scales: Tensor, offsets: Tensor | None, bits: int) -> QuantizedRows:
    offsets = None if offsets is None else as_bfloat16(offsets.flatten(1))
    return QuantizedRows(values.flatten(1), as_bfloat16(scales.flatten(1)), offsets, GROUP_SIZE // 2, bits=bits)


def _bits_of_runs(packed: Tensor, length: int, width: int) -> Tensor:
    """Apply `_bits` to consecutive runs of `length` bytes."""
    return _bits(packed.reshape(*packed.shape[:-1], -1, length), width).flatten(-2)


def _bits(packed: Tensor, width: int) -> Tensor:
    """Return the lowest `width` bits of all bytes, then the next `width` bits, and so on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (packed[..., None, :] >> shifts & (1 << width) - 1).flatten(-2)


def _float16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).float()
