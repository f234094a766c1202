"""4-bit weights in groups of 32 columns: Q4_0 and Q4_1 blocks of GGUF files as they are, others quantized here.

A block is 32 weights of one row. Q4_0: float16 d, then 16 bytes of values; w = d (value - 8). Q4_1: float16 d and m,
then the values; w = d value + m. Byte i holds value i in its low half and value i + 16 in its high half.

GEMMs take scales and offsets in bfloat16, so they are rounded to it here. The file's float16 numbers lose three bits,
which moves a weight by at most a few hundredths of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quantization.quantized_rows import INT4_MIDDLE, QuantizedRows

GROUP_SIZE = 32
Q4_0, Q4_1 = 2, 3  # ggml's type numbers
BLOCK_BYTES = {Q4_0: 18, Q4_1: 20}


def int4_rows(raw: Tensor, type_id: int) -> QuantizedRows:
    """raw: uint8 (rows, blocks * block bytes) of a Q4_0 or Q4_1 tensor."""
    blocks = raw.view(raw.shape[0], -1, BLOCK_BYTES[type_id])
    num_halves = BLOCK_BYTES[type_id] - 16
    halves = blocks[..., :num_halves].contiguous().view(torch.float16).float()
    packed = blocks[..., num_halves:]
    values = torch.cat([packed & 15, packed >> 4], dim=-1).flatten(1)
    scales = halves[..., 0]
    offsets = halves[..., 1] + INT4_MIDDLE * scales if type_id == Q4_1 else torch.zeros_like(scales)
    return QuantizedRows(values, as_bfloat16(scales), as_bfloat16(offsets), GROUP_SIZE)


def quantize_int4(weight: Tensor) -> QuantizedRows:
    """weight (rows, columns), columns a multiple of 32: to the nearest of 16 steps between a group's extremes."""
    groups = weight.float().view(weight.shape[0], -1, GROUP_SIZE)
    low, high = groups.aminmax(dim=-1)
    scales = as_bfloat16(((high - low) / 15).clamp_min(1e-12))
    offsets = as_bfloat16(low + INT4_MIDDLE * scales)
    steps = (groups - offsets[..., None]) / scales[..., None]
    values = (steps.round() + INT4_MIDDLE).clamp(0, 15).to(torch.uint8).flatten(1)
    return QuantizedRows(values, scales, offsets, GROUP_SIZE)


def as_bfloat16(numbers: Tensor) -> Tensor:
    """float32 numbers rounded to those that bfloat16 has."""
    return numbers.bfloat16().float()
