"""w8a8_linear and w8a16_linear against cuBLAS in bfloat16 and torch's `_int_mm`, from one row to
many; quantization of x included.

`--sweep` tries tiles, splits, warps and stages; the settings in the kernels' files come from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.kernels.quantized import EightBit, run
from kernels.gpu.rounding import quantize_rows
from kernels.gpu.w8a8_gemm import w8a8_linear, w8a16_linear


def int_mm(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    codes, x_scales = quantize_rows(x, torch.int8)
    return (torch._int_mm(codes, weight.t()) * (x_scales[:, None] * scales)).bfloat16()


KINDS = (
    EightBit("w8a8_gemm", torch.int8, 1, w8a8_linear, int_mm),
    EightBit("w8a16_gemm", torch.int8, 2, w8a16_linear, None),
)


if __name__ == "__main__":
    run(__doc__, *KINDS)
