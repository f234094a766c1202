"""4-bit weights of GGUF files: Q4_0 and Q4_1 blocks as they are.

A block is 32 weights of one row. Q4_0: float16 d, then 16 bytes of values; w = d (value - 8). Q4_1: float16 d and m,
then the values; w = d value + m. Byte i holds value i in its low half and value i + 16 in its high half.

Scales and offsets are rounded to bfloat16 (`engine/quantization/int4.py`): the file's float16 numbers lose three
bits, which moves a weight by at most a few hundredths of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quantization.int4 import GROUP_SIZE, as_bfloat16
from engine.quantization.quantized_rows import INT4_MIDDLE, QuantizedRows

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
