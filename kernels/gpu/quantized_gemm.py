"""GEMM of quantized rows with 8-bit weights, int8 and e4m3 alike: sliced-K for few rows, else tiles.

    y_mn = a_m s_n sum_k q_mk w_nk + b_n       q one plane of a row, or 256 h + l of two (`kernels/gpu/quantize.py`)

References: `kernels/w8a8_gemm.py`, `kernels/fp8_gemm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.skinny_gemm import skinny_gemm
from kernels.gpu.sliced_k_gemm import sliced_k_gemm
from kernels.gpu.split_k import SplitKWorkspace
from kernels.gpu.tuning import SKINNY_8_BIT, SLICED_K


def quantized_gemm(
    values: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    workspace: SplitKWorkspace,
) -> Tensor:  # fmt: skip
    """values (num_planes * rows, in), x_scales (rows,); weight (out, in), scales (out,). Returns (rows, out)."""
    shape = values.shape[0], *weight.shape
    sliced = SLICED_K.find(*shape)
    if sliced is not None:
        return sliced_k_gemm(values, x_scales, weight, scales, bias, dtype, sliced)
    tile = SKINNY_8_BIT.find(*shape)
    assert tile is not None, "the last rule has no bounds"
    return skinny_gemm(values, weight, bias, workspace, tile, x_scales, scales, dtype)
