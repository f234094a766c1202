"""4-bit weights as values, scales and offsets: Q4_0 and Q4_1 blocks of GGUF files as they are, others quantized here.

A block is 32 weights of one row. Q4_0: float16 d, then 16 bytes of values; w = d (value - 8). Q4_1: float16 d and m,
then the values; w = d value + m. Byte i holds value i in its low half and value i + 16 in its high half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32
Q4_0, Q4_1 = 2, 3  # ggml's type numbers
BLOCK_BYTES = {Q4_0: 18, Q4_1: 20}


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """w[i, j] = (values[i, j] - 8) * scales[i, j // 32] + zeros[i, j // 32].

    values uint8 (rows, columns), 0 to 15; scales and zeros bfloat16 (rows, columns / 32). The file's float16 numbers
    lose three bits, which moves a weight by at most a few hundredths of a step.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        groups = self.values.view(*self.scales.shape, GROUP_SIZE).float().sub_(8)
        weight = groups.mul_(self.scales.float()[..., None]).add_(self.zeros.float()[..., None])
        return weight.flatten(1).to(dtype)


def int4_rows(raw: Tensor, type_id: int) -> Int4Rows:
    """raw: uint8 (rows, blocks * block bytes) of a Q4_0 or Q4_1 tensor."""
    blocks = raw.view(raw.shape[0], -1, BLOCK_BYTES[type_id])
    num_halves = BLOCK_BYTES[type_id] - 16
    halves = blocks[..., :num_halves].contiguous().view(torch.float16).float()
    packed = blocks[..., num_halves:]
    values = torch.cat([packed & 15, packed >> 4], dim=-1).flatten(1)
    scales = halves[..., 0]
    zeros = halves[..., 1] + 8 * scales if type_id == Q4_1 else torch.zeros_like(scales)
    return Int4Rows(values, scales.bfloat16(), zeros.bfloat16())


def quantize_int4(weight: Tensor) -> Int4Rows:
    """weight (rows, columns), columns a multiple of 32: to the nearest of 16 steps between a group's extremes."""
    groups = weight.float().view(weight.shape[0], -1, GROUP_SIZE)
    low, high = groups.aminmax(dim=-1)
    scales = ((high - low) / 15).clamp_min(1e-12).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    steps = (groups - zeros.float()[..., None]) / scales.float()[..., None]
    return Int4Rows((steps.round() + 8).clamp(0, 15).to(torch.uint8).flatten(1), scales, zeros)
