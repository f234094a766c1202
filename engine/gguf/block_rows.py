"""Weights of 4 to 6 bits of GGUF files: blocks of Q4_0, Q4_1, Q4_K, Q5_K and Q6_K as they are.

A block of Q4_0 or Q4_1 is 32 weights of one row. Q4_0: float16 d, then 16 bytes of values; w = d (value - 8). Q4_1:
float16 d and m, then the values; w = d value + m. Byte i holds value i in its low half and value i + 16 in its high
half. A superblock of Q4_K is 8 groups of 32: float16 d and dmin, 12 bytes with 6 bits of a scale s and of a minimum
m for each group, then 32 bytes for each two groups, the first in the low halves; w = d s value - dmin m. One of
Q5_K has 32 more bytes before those, whose bit g is the fifth of group g. A superblock of Q6_K is 16 groups of 16:
128 bytes of low halves, of 64 values each in 32 bytes, 64 bytes of two high bits, the scales s, int8, and float16
d; w = d s (value - 32).

Scales and offsets are rounded to bfloat16 (`engine/quantization/int4.py`). This moves weights of Q4_0 and Q4_1 by at
most a few hundredths of a step, and those of Q4_K by 0.2% (rms, Qwen2.5-Coder-0.5B and Gemma-3-270M in Q4_K_M), where
int8 with a scale per row moves them by 0.9 to 2.6%.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quantization.int4 import GROUP_SIZE, as_bfloat16
from engine.quantization.quantized_rows import INT4_MIDDLE, QuantizedRows

Q4_0, Q4_1, Q4_K, Q5_K, Q6_K = 2, 3, 12, 13, 14  # ggml's type numbers
BLOCK_BYTES = {Q4_0: 18, Q4_1: 20, Q4_K: 144, Q5_K: 176, Q6_K: 210}
BITS = {Q4_0: 4, Q4_1: 4, Q4_K: 4, Q5_K: 5, Q6_K: 6}


def block_rows(raw: Tensor, type_id: int) -> QuantizedRows:
    """raw: uint8 (rows, blocks * block bytes) of a tensor of one of these types."""
    blocks, bits = raw.view(raw.shape[0], -1, BLOCK_BYTES[type_id]), BITS[type_id]
    if type_id == Q6_K:
        return _q6_rows(blocks)
    if type_id in (Q4_K, Q5_K):
        values, scales, minima = _superblocks(blocks)
        offsets = (1 << bits - 1) * scales - minima
    else:
        num_halves = BLOCK_BYTES[type_id] - 16
        halves = _float16(blocks[..., :num_halves])
        values = _nibbles(blocks[..., num_halves:])
        scales = halves[..., 0]
        offsets = halves[..., 1] + INT4_MIDDLE * scales if type_id == Q4_1 else torch.zeros_like(scales)
    return QuantizedRows(values.flatten(1), as_bfloat16(scales), as_bfloat16(offsets), GROUP_SIZE, bits=bits)


def _superblocks(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values of Q4_K or Q5_K, and scales and minima, each (rows, groups)."""
    halves = _float16(blocks[..., :4])
    a, b, c = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]  # c: low bits of the last four groups
    scales = torch.cat([a & 63, c & 15 | a >> 6 << 4], dim=-1)
    minima = torch.cat([b & 63, c >> 4 | b >> 6 << 4], dim=-1)
    values = _nibbles(blocks[..., -128:].reshape(*blocks.shape[:2], 4, 32)).flatten(-2)
    if blocks.shape[-1] == BLOCK_BYTES[Q5_K]:
        groups = torch.arange(8, dtype=torch.uint8)[:, None]
        values |= ((blocks[..., None, 16:48] >> groups & 1) << 4).flatten(-2)
    return values, (halves[..., :1] * scales).flatten(1), (halves[..., 1:] * minima).flatten(1)


def _q6_rows(blocks: Tensor) -> QuantizedRows:
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))  # 128 values of each half
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts & 3
    values = low | high.flatten(-2) << 4
    scales = _float16(blocks[..., 208:]) * blocks[..., 192:208].view(torch.int8)
    return QuantizedRows(values.flatten(1), as_bfloat16(scales.flatten(1)), None, GROUP_SIZE // 2, bits=6)


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of bytes, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _float16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).float()
