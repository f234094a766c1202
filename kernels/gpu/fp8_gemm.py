"""Linear maps over e4m3 weights and activations on a GPU.

Kernels: `kernels/gpu/eight_bit.py`. One row streams W through registers and adds in float32; several rows go through
matrix units. Formula and reference: `kernels/fp8_gemm.py`.
"""

from __future__ import annotations

from torch import Tensor

from kernels.fp8_gemm import FP8_DTYPE
from kernels.gpu.eight_bit import RowConfig, one_row, quantize_rows, several_rows
from kernels.gpu.small_m_gemm import SmallMWorkspace
from kernels.gpu.w8a8_gemm import choose_rows

ONE_ROW = RowConfig(4, 512, num_warps=2, num_stages=4)


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SmallMWorkspace) -> Tensor:
    """x (rows, in), columns of stride 1; weight e4m3 (out, in); scales float32 (out,). Returns (rows, out)."""
    if x.shape[0] == 1:
        return one_row(x, weight, scales, bias, ONE_ROW, quantizes=True)
    codes, x_scales = quantize_rows(x, FP8_DTYPE)
    config = choose_rows(x.shape[0], *weight.shape)
    return several_rows(codes, x_scales, weight, scales, bias, x.dtype, workspace, config)
