"""Plain weights of a checkpoint as Q8_0 blocks, for CPUs: 32 columns share a scale, in 34 bytes.

torch's int8 GEMM has a scale per row and is slow from 5 rows of x on, so its layers also keep a dense copy: 3 bytes
per weight. `kernels/gguf` reads blocks for any number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.gguf.packed import block_linear
from engine.layers.linear import Linear
from engine.quantization.cpu_linears import NUMBERS_AT_ONCE, CpuLinears
from kernels.gguf.linear import BLOCK_COLUMNS, Blocks, BlockWeight, max_integer_rows

Q8_0 = 8  # ggml's type number
SIZE = BLOCK_COLUMNS[Q8_0]
BLOCK_BYTES = 2 + SIZE  # a float16 and SIZE int8


class BlockLinears(CpuLinears):
    """See CpuLinears. Plain layers become blocks if their columns fill them."""

    label = "q8_0"  # the quantization mode that users see

    def of_plain(self, linear: Linear, quant_mode: str = "int8-weight", is_head: bool = False) -> Linear:
        """See CpuLinears."""
        num_columns = linear.weight.shape[1]
        if num_columns % SIZE:
            return super().of_plain(linear, quant_mode, is_head)
        weight = BlockWeight([Blocks(quantize_q8_0(linear.weight), Q8_0)], num_columns)
        return block_linear(weight, linear.bias, max_integer_rows())


def quantize_q8_0(weight: Tensor) -> Tensor:
    """Quantize (rows, columns) to uint8 (rows, bytes of a row): a block's largest magnitude becomes 127."""
    blocks = torch.empty(len(weight), weight.shape[1] // SIZE, BLOCK_BYTES, dtype=torch.uint8)
    step = max(NUMBERS_AT_ONCE // weight.shape[1], 1)
    for first in range(0, len(weight), step):
        numbers = weight[first : first + step].float().view(-1, blocks.shape[1], SIZE)
        scales = (numbers.abs().amax(dim=2, keepdim=True) / 127.0).half()
        values = (numbers / torch.where(scales > 0, scales, 1.0).float()).round_().clamp_(-127, 127)
        blocks[first : first + step, :, :2] = scales.view(torch.uint8)
        blocks[first : first + step, :, 2:] = values.to(torch.int8).view(torch.uint8)
    return blocks.flatten(1)
