"""fp8_linear against cuBLAS in bfloat16 and torch's `_scaled_mm`, from one row to many; quantization of x included.

`--sweep` tries tiles, splits, warps and stages; the settings in the kernels' files come from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.kernels.quantized import EightBit, run
from kernels.fp8_gemm import FP8_DTYPE
from kernels.gpu.fp8_gemm import fp8_linear
from kernels.gpu.rounding import quantize_rows


def scaled_mm(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    codes, x_scales = quantize_rows(x, FP8_DTYPE)
    return torch._scaled_mm(
        codes, weight.t(), x_scales[:, None], scales[None, :], out_dtype=torch.bfloat16, use_fast_accum=True
    )


KIND = EightBit("fp8_gemm", FP8_DTYPE, 1, fp8_linear, scaled_mm)


if __name__ == "__main__":
    run(__doc__, KIND)
