"""A decode step's layers for 2 to 32 rows of a small model: norms are part of the products around them.

What changes the residual also leaves what the next norm needs (`Residual`), which saves two kernels a layer. Where
products take long, or gate and up are one kernel already, that gains nothing: `takes` knows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.layers.decoder import DecoderModel
from engine.layers.linear import Linear, LinearMap
from kernels.gpu.rms_norm import embed_rms_norm, rms_norm
from kernels.gpu.silu_mul import silu_mul
from kernels.gpu.small_m_gemm import (
    MAX_WINNING_ROWS,
    Residual,
    SmallMConfig,
    SmallMWorkspace,
    choose,
    small_m_add,
    small_m_linear,
)

MAX_HIDDEN = 2048
Attend = Callable[[int, Tensor], Tensor]
"""(layer, q/k/v product (rows, heads + 2 KV heads, head_dim)) -> (rows, heads * head_dim)"""


def is_small(model: DecoderModel) -> bool:
    """Whether the model can and should go this way. float16 does not hold a residual that is weighted, not scaled."""
    return (
        model.config.hidden_size <= MAX_HIDDEN
        and model.embedding.dtype is not torch.float16
        and all(
            type(linear) is Linear
            for layer in model.layers
            for linear in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
        )
    )


class FewRowLayers:
    """All layers of `model`. Its workspace serves one stream."""

    def __init__(self, model: DecoderModel, device: torch.device) -> None:
        self._model = model
        self._is_small = is_small(model)
        self._workspace = SmallMWorkspace(device)

    def takes(self, num_rows: int) -> bool:
        return self._is_small and 1 < num_rows <= MAX_WINNING_ROWS

    def hidden(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """token_ids (rows,) -> hidden states (rows, hidden) after the final norm."""
        model, eps, head_dim = self._model, self._model.config.rms_norm_eps, self._model.config.head_dim
        value, x = embed_rms_norm(token_ids, model.embedding, model.layers[0].attention_norm, eps)
        squares = torch.empty(value.numel() // 16, dtype=torch.float32, device=value.device)
        residual = Residual(value, torch.empty_like(value), squares)
        for index, layer in enumerate(model.layers):
            qkv = self._product(layer.qkv, x, residual if index else None)
            self._add(
                layer.attention_output, attend(index, qkv.view(qkv.shape[0], -1, head_dim)), residual, layer.mlp_norm
            )
            gate_up = self._product(layer.gate_up, residual.scaled, residual)
            is_last = index + 1 == len(model.layers)
            norm = model.final_norm if is_last else model.layers[index + 1].attention_norm
            self._add(layer.down, silu_mul(gate_up), residual, norm)
            x = residual.scaled
        return rms_norm(value, model.final_norm, eps)

    def _product(self, linear: LinearMap, x: Tensor, normed: Residual | None) -> Tensor:
        assert type(linear) is Linear
        settings, eps = self._settings(linear.weight, x), self._model.config.rms_norm_eps
        return small_m_linear(x, linear.weight, linear.bias, self._workspace, settings, normed, eps)

    def _add(self, linear: LinearMap, x: Tensor, residual: Residual, next_norm: Tensor) -> None:
        assert type(linear) is Linear
        settings = self._settings(linear.weight, x)
        small_m_add(x, linear.weight, linear.bias, residual, next_norm, self._workspace, settings)

    def _settings(self, weight: Tensor, x: Tensor) -> SmallMConfig:
        if x.dtype.itemsize != 2:
            return SmallMConfig(32, 32, 2, num_stages=2)
        settings = choose(x.shape[0], weight.shape[0], weight.shape[1])
        assert settings is not None
        return settings
