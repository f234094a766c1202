"""GEMMs with e4m3 weights and activations on a GPU.

Up to some rows our kernels (`kernels/gpu/quantized_gemm.py`), which read W fast; beyond, torch's.
Formula and reference: `kernels/fp8_gemm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.fp8_gemm import FP8_DTYPE
from kernels.gpu.quantize import quantize_rows
from kernels.gpu.quantized_gemm import quantized_gemm
from kernels.gpu.split_k import SplitKWorkspace
from kernels.gpu.tuning import MAX_FP8_ROWS


def fp8_gemm(
    values: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    workspace: SplitKWorkspace,
) -> Tensor:  # fmt: skip
    """values e4m3 (rows, in) with x_scales (rows,); weight e4m3 (out, in) with scales (out,). Returns (rows, out)."""
    if values.shape[0] > MAX_FP8_ROWS and weight.shape[0] % 16 == 0 and dtype == torch.bfloat16:
        y: Tensor = torch._scaled_mm(
            values, weight.t(), x_scales[:, None], scales[None, :], out_dtype=dtype, use_fast_accum=True
        )
        return y if bias is None else y.add_(bias)
    return quantized_gemm(values, x_scales, weight, scales, bias, dtype, workspace)


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SplitKWorkspace) -> Tensor:
    """x (rows, in), columns of stride 1; weight e4m3 (out, in); scales float32 (out,). Returns (rows, out)."""
    return fp8_gemm(*quantize_rows(x, FP8_DTYPE), weight, scales, bias, x.dtype, workspace)
