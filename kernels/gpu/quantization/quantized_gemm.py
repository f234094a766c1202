"""GEMMs of quantized rows with 8-bit weights, int8 or e4m3: sliced-K for few rows, tiles, or torch's own.

    y_mn = a_m s_n sum_k q_mk w_nk + b_n       q one plane of a row, or 256 h + l of two (`quantize.py`)

Reference: `kernels/quantization/quantized_gemm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.few_rows.skinny_gemm import skinny_gemm
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.quantization.quantized_tuning import MAX_FP8_ROWS, SKINNY_8_BIT, SLICED_K
from kernels.gpu.quantization.sliced_k_gemm import sliced_k_gemm
from kernels.quantization.quantized_gemm import FP8_DTYPE

BLOCK = 2048  # weights per program of the dequantization


def quantized_gemm(
    values: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    workspace: SplitKWorkspace,
) -> Tensor:  # fmt: skip
    """Multiply values (num_planes * rows, in), x_scales (rows,) by weight (out, in), scales (out,). Returns (rows,
    out).

    Sums of int8 are integers, so a row's result is the same for any number of rows.
    """
    (num_rows, k), n = values.shape, weight.shape[0]
    if weight.dtype == FP8_DTYPE and num_rows > MAX_FP8_ROWS and n % 16 == 0 and dtype == torch.bfloat16:
        y: Tensor = torch._scaled_mm(
            values, weight.t(), x_scales[:, None], scales[None, :], out_dtype=dtype, use_fast_accum=True
        )
        return y if bias is None else y.add_(bias)
    sliced = SLICED_K.find(num_rows, n, k)
    if sliced is not None:
        return sliced_k_gemm(values, x_scales, weight, scales, bias, dtype, sliced)
    tile = SKINNY_8_BIT.find(num_rows, n, k)
    assert tile is not None, "the last rule has no bounds"
    return skinny_gemm(values, weight, bias, workspace, tile, x_scales, scales, dtype)


def dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize int8 (out, in), contiguous, with scales (out,) to `dtype`, for GEMMs of many rows."""
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
