"""Linear maps over int8 weights on a GPU, with activations rounded per token (w8a8) or as they are (w8a16).

Kernels: `kernels/gpu/eight_bit.py`. Sums of w8a8 are integers: a row's result is the same at any number of rows.
Formula and reference: `kernels/w8a8_gemm.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.gpu.eight_bit import choose_row, choose_rows, codes_product, one_row, several_rows
from kernels.gpu.rounding import quantize_rows
from kernels.gpu.small_m_gemm import SmallMWorkspace


def w8a8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SmallMWorkspace) -> Tensor:
    """x (rows, in), columns of stride 1; weight int8 (out, in); scales float32 (out,). Returns (rows, out)."""
    return codes_product(*quantize_rows(x, torch.int8), weight, scales, bias, x.dtype, workspace)


def w8a16_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SmallMWorkspace
) -> Tensor:
    """The same without rounding x."""
    n, k = weight.shape
    if x.shape[0] == 1:
        return one_row(x, weight, scales, bias, choose_row(n, k))
    config = choose_rows(x.shape[0], n, k)
    config = replace(config, block_k=config.block_k // 2)  # x takes two bytes
    return several_rows(x, None, weight, scales, bias, x.dtype, workspace, config)
