"""A decode step's layers for a few rows: three fused products and attention, instead of eight kernels.

Knows no graphs and no batches; `FusedForward` asks `takes` and hands over. The kernels and their settings are those of
`kernels.gpu.few_rows`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.layers.decoder import DecoderModel
from engine.layers.linear import Linear, LinearMap
from kernels.gpu.few_rows import MAX_FEW_ROWS, add_product, choose_few_rows, embed, gated, rotated_qkv
from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.small_m_gemm import SmallMConfig, SmallMWorkspace

Attend = Callable[[int, Tensor], Tensor]
"""(layer, q (rows, heads, head_dim)) -> (rows, heads * head_dim)"""


def has_plain_weights(model: DecoderModel) -> bool:
    return all(
        type(linear) is Linear
        for layer in model.layers
        for linear in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
    )


def most_rows(model: DecoderModel, pool: Tensor) -> int:
    """Rows up to which this way is faster than the plain one; 0: never, or not possible."""
    dtype = model.embedding.dtype
    if not has_plain_weights(model) or pool.dtype is not dtype or dtype is torch.float16:
        return 0  # float16 does not hold a residual that is weighted before it is scaled
    return min(64 if model.config.hidden_size <= 2048 else 16, MAX_FEW_ROWS)


class FewRowLayers:
    """All layers of `model` over `pool`. Its workspace serves one stream."""

    def __init__(self, model: DecoderModel, pool: Tensor) -> None:
        self._model = model
        self._pool = pool
        self._most_rows = most_rows(model, pool)
        self._workspace = SmallMWorkspace(pool.device)

    def takes(self, num_rows: int) -> bool:
        return num_rows <= self._most_rows

    def hidden(self, token_ids: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        """Hidden states (rows, hidden) after the final norm; arguments as in `GpuInputs`."""
        model, workspace = self._model, self._workspace
        eps = model.config.rms_norm_eps
        rows, dtype = token_ids.shape[0], model.embedding.dtype
        residual = embed(token_ids, model.embedding, model.layers[0].attention_norm)

        def add(x: Tensor, linear: LinearMap, next_norm: Tensor) -> None:
            weight, bias = weight_of(linear)
            add_product(x, weight, bias, residual, next_norm, workspace, settings_for(weight, is_pair=False))

        def settings_for(weight: Tensor, is_pair: bool) -> SmallMConfig:
            return choose_few_rows(rows, weight.shape[0], weight.shape[1], dtype, is_pair)

        for index, layer in enumerate(model.layers):
            weight, bias = weight_of(layer.qkv)
            q = rotated_qkv(
                residual, weight, bias, eps, model.rotary, positions, slots, layer.qk_norm, self._pool, index,
                workspace, settings_for(weight, is_pair=True),
            )  # fmt: skip
            add(attend(index, q), layer.attention_output, layer.mlp_norm)
            weight, bias = weight_of(layer.gate_up)
            inner = gated(residual, weight, bias, eps, workspace, settings_for(weight, is_pair=True))
            is_last = index + 1 == len(model.layers)
            add(inner, layer.down, model.final_norm if is_last else model.layers[index + 1].attention_norm)
        return rms_norm(residual.value, model.final_norm, eps)


def weight_of(linear: LinearMap) -> tuple[Tensor, Tensor | None]:
    assert type(linear) is Linear
    return linear.weight, linear.bias
