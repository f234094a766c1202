"""Linear maps of a few rows: the kernels that read weights fastest where they were measured to win, else cuBLAS.

Which shapes those are, `kernels.gpu.small_m_gemm.choose` knows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.decoder import DecoderModel
from engine.layers.linear import Linear, LinearMap
from kernels.gpu.gated_gemm import choose_gated, gated_linear
from kernels.gpu.silu_mul import silu_mul
from kernels.gpu.small_m_gemm import FUSED_GEMV, SmallMWorkspace, choose, gemv, small_m_linear


class FewRows:
    """Applies linear maps. Its workspace serves one stream."""

    def __init__(self, device: torch.device) -> None:
        self._workspace = SmallMWorkspace(device)

    def __call__(self, linear: LinearMap, x: Tensor) -> Tensor:
        """x: (rows, in) -> (rows, out)."""
        if type(linear) is not Linear or x.dtype.itemsize != 2:
            return linear(x)
        n, k = linear.weight.shape
        config = choose(x.shape[0], n, k)
        if config is None:
            return linear(x)
        return small_m_linear(x, linear.weight, linear.bias, self._workspace, config)

    def gated(self, gate_up: LinearMap, x: Tensor) -> Tensor:
        """x: (rows, in) -> silu(gate) * up, (rows, out / 2)."""
        if type(gate_up) is Linear:
            config = choose_gated(x.shape[0], gate_up.weight.shape[0] // 2, x.dtype)
            if config is not None:
                return gated_linear(x, gate_up.weight, gate_up.bias, config)
        return silu_mul(self(gate_up, x))


def takes_fused_rows(model: DecoderModel) -> bool:
    """Whether a single row can go through `fused_row`: plain weights everywhere."""
    return all(
        type(linear) is Linear
        for layer in model.layers
        for linear in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
    )


def fused_row(
    linear: LinearMap, x: Tensor, norm: Tensor | None = None, eps: float = 0.0, added_to: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:  # fmt: skip
    """`gemv` of one row: norm before, gate or residual behind the product."""
    assert type(linear) is Linear
    return gemv(x, linear.weight, linear.bias, FUSED_GEMV, norm, eps, added_to, is_gated)
