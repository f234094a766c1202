"""Linear maps over int8 weights on a GPU, with activations rounded per token (w8a8) or as they are (w8a16).

Kernels: `kernels/gpu/eight_bit.py`. One row streams W through registers, w8a8 with four products an instruction;
several rows go through matrix units. Sums of w8a8 are integers: every path gives the same.
Formula and reference: `kernels/w8a8_gemm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.eight_bit import RowConfig, RowsConfig, one_row, quantize_rows, several_rows
from kernels.gpu.small_m_gemm import SmallMWorkspace

ONE_ROW = RowConfig(4, 1024, num_warps=2, num_stages=4)


def choose_rows(num_rows: int, n: int, k: int) -> RowsConfig:
    """Tiles for x (num_rows, k), both operands of one byte, on an H200."""
    block_m = max(16, 1 << (num_rows - 1).bit_length())
    if block_m <= 64:
        num_tiles = -(-n // 64)
        split_k = 4 if num_tiles < 33 else 1 if num_tiles > 128 or k <= 4096 else 2
        return RowsConfig(block_m, 64, 256, split_k, num_warps=4, num_stages=4 if block_m < 64 else 3)
    if block_m == 128:
        return RowsConfig(128, 64, 128, 1, num_warps=4, num_stages=4)
    return RowsConfig(128, 128, 128, 1, num_warps=8, num_stages=4)


def w8a8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SmallMWorkspace) -> Tensor:
    """x (rows, in), columns of stride 1; weight int8 (out, in); scales float32 (out,). Returns (rows, out)."""
    if x.shape[0] == 1:
        return one_row(x, weight, scales, bias, ONE_ROW, quantizes=True)
    codes, x_scales = quantize_rows(x, torch.int8)
    config = choose_rows(x.shape[0], *weight.shape)
    return several_rows(codes, x_scales, weight, scales, bias, x.dtype, workspace, config)


def w8a16_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SmallMWorkspace
) -> Tensor:
    """The same without rounding x."""
    if x.shape[0] == 1:
        return one_row(x, weight, scales, bias, ONE_ROW, quantizes=False)
    config = choose_rows(x.shape[0], *weight.shape)
    half = RowsConfig(
        config.block_m, config.block_n, config.block_k // 2, config.split_k, config.num_warps, config.num_stages
    )
    return several_rows(x, None, weight, scales, bias, x.dtype, workspace, half)
