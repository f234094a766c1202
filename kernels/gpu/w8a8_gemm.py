"""Linear maps over int8 weights on a GPU, with activations rounded per token (w8a8) or as they are (w8a16).

Kernels: `kernels/gpu/eight_bit.py`. One row streams W through registers, w8a8 with four products an instruction;
several rows go through matrix units. Sums of w8a8 are integers: every path gives the same.
Formula and reference: `kernels/w8a8_gemm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.eight_bit import RowsConfig, choose_row, choose_rows, one_row, quantize_rows, several_rows
from kernels.gpu.small_m_gemm import SmallMWorkspace


def w8a8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SmallMWorkspace) -> Tensor:
    """x (rows, in), columns of stride 1; weight int8 (out, in); scales float32 (out,). Returns (rows, out)."""
    n, k = weight.shape
    if x.shape[0] == 1:
        return one_row(x, weight, scales, bias, choose_row(n, k, True), quantizes=True)
    codes, x_scales = quantize_rows(x, torch.int8)
    config = choose_rows(x.shape[0], n, k)
    return several_rows(codes, x_scales, weight, scales, bias, x.dtype, workspace, config)


def w8a16_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SmallMWorkspace
) -> Tensor:
    """The same without rounding x."""
    n, k = weight.shape
    if x.shape[0] == 1:
        return one_row(x, weight, scales, bias, choose_row(n, k, False), quantizes=False)
    config = choose_rows(x.shape[0], n, k)
    half = RowsConfig(
        config.block_m, config.block_n, config.block_k // 2, config.split_k, config.num_warps, config.num_stages
    )
    return several_rows(x, None, weight, scales, bias, x.dtype, workspace, half)
