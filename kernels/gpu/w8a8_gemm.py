"""GEMMs with int8 weights on a GPU, activations quantized per token to int8 (w8a8) or 16 bits (w8a16).

Kernels: `kernels/gpu/quantized_gemm.py`. Formula and reference: `kernels/w8a8_gemm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.gpu.quantize import quantize_rows
from kernels.gpu.quantized_gemm import quantized_gemm
from kernels.gpu.split_k import SplitKWorkspace
from kernels.gpu.tuning import MAX_TWO_PLANE_ROWS

BLOCK = 2048  # weights a program writes out


def w8a8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SplitKWorkspace) -> Tensor:
    """x (rows, in), columns of stride 1; weight int8 (out, in); scales float32 (out,). Returns (rows, out).

    Sums are integers: a row's result is the same at any number of rows.
    """
    return quantized_gemm(*quantize_rows(x, torch.int8), weight, scales, bias, x.dtype, workspace)


def w8a16_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SplitKWorkspace
) -> Tensor:
    """`w8a8_linear` with x quantized to 16 bits per token, as two int8 planes.

    This adds less error to a row than rounding it to bfloat16 did, while its largest element is below 187 times its
    root mean square; sqrt(K) times is the most (docs/decisions/0094). With many rows writing the weight out in the
    dtype of x is faster.
    """
    if x.shape[0] > MAX_TWO_PLANE_ROWS:
        return functional.linear(x, dequantize(weight, scales, x.dtype), bias)
    return quantized_gemm(*quantize_rows(x, torch.int8, 2), weight, scales, bias, x.dtype, workspace)


def dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 (out, in), contiguous, with scales (out,) -> `dtype`."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.device)
    _dequantize_kernel[(n, triton.cdiv(k, BLOCK))](weight, scales, out, k, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _dequantize_kernel(weight_ptr, scales_ptr, out_ptr, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ks = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + row * K + ks, mask=ks < K, other=0)
    value = weight.to(tl.float32) * tl.load(scales_ptr + row)
    tl.store(out_ptr + row * K + ks, value.to(out_ptr.dtype.element_ty), mask=ks < K)
