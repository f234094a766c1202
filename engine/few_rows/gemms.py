"""Chooses the kernel of a layer's GEMM by the number of rows; None: cuBLAS, or the layer's own GEMM, is faster."""

from __future__ import annotations

from functools import partial

from engine.layers.linear import Linear, LinearLayer
from kernels.gpu.few_rows.few_row_tuning import FUSED_GEMV, GEMV, SKINNY, SKINNY_GATED
from kernels.gpu.few_rows.gated_gemm import gated_linear
from kernels.gpu.few_rows.gemv import gemv
from kernels.gpu.few_rows.skinny_gemm import skinny_gemm
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.tuning import found


def gemm(layer: Linear, num_rows: int, workspace: SplitKWorkspace) -> LinearLayer | None:
    """Return the GEMM (num_rows, in) -> (num_rows, out), or None."""
    if not is_16_bit(layer):
        return None
    n, k = layer.weight.shape
    if num_rows == 1 and (row := GEMV.find(1, n, k)) is not None:
        return partial(gemv, weight=layer.weight, bias=layer.bias, config=row)
    config = SKINNY.find(num_rows, n, k)
    if config is None:
        return None
    return partial(skinny_gemm, weight=layer.weight, bias=layer.bias, workspace=workspace, config=config)


def gated_gemm(gate_up: Linear, num_rows: int, is_gelu: bool) -> LinearLayer | None:
    """Return the GEMM (num_rows, in) -> silu(gate) * up, (num_rows, out / 2), or None. is_gelu: GELU instead."""
    if not is_16_bit(gate_up):
        return None
    n, k = gate_up.weight.shape
    if num_rows == 1 and gate_up.bias is None:
        row = found(FUSED_GEMV.find(1, n, k))
        return partial(gemv, weight=gate_up.weight, bias=None, config=row, is_gated=True, is_gelu=is_gelu)
    config = SKINNY_GATED.find(num_rows, n // 2, k)
    if config is None:
        return None
    return partial(gated_linear, weight=gate_up.weight, bias=gate_up.bias, config=config, is_gelu=is_gelu)


def is_16_bit(layer: Linear) -> bool:
    """Whether the weight is plain, and of a 16-bit dtype, as these kernels need."""
    return layer.is_plain and layer.weight.dtype.itemsize == 2
