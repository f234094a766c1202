"""A decode step's layers for up to 64 rows of a small model: a product's weights are on the chip before it starts.

Products come in parts (`kernels.gpu.preloaded_gemm`), which the kernels behind them add up: rotation, norms, gate.
With larger weights there is no room to bring them early, and with more rows x takes longer than they: `takes` knows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from engine.layers.decoder import DecoderModel
from engine.layers.linear import Linear, LinearMap
from kernels.gpu.parts import add_rms_norm_of_parts, silu_mul_of_parts
from kernels.gpu.preloaded_gemm import choose_preloaded, fits_preloaded, preloaded_linear
from kernels.gpu.rms_norm import embed_rms_norm

AttendParts = Callable[[int, Tensor], Tensor]
"""(layer, parts of the q/k/v product (num_parts, rows, heads + 2 KV heads, head_dim)) -> (rows, heads * head_dim)"""


MAX_HIDDEN = 2048


class PreloadedLayers:
    """All layers of `model`."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self.takes = cache(self._takes)

    def hidden(self, token_ids: Tensor, attend: AttendParts) -> Tensor:
        """token_ids (rows,) -> hidden states (rows, hidden) after the final norm."""
        model, eps, head_dim = self._model, self._model.config.rms_norm_eps, self._model.config.head_dim
        residual, x = embed_rms_norm(token_ids, model.embedding, model.layers[0].attention_norm, eps)
        for index, layer in enumerate(model.layers):
            qkv = _product(layer.qkv, x)
            attended = attend(index, qkv.view(*qkv.shape[:2], -1, head_dim))
            x = add_rms_norm_of_parts(_product(layer.attention_output, attended), residual, layer.mlp_norm, eps)
            x = silu_mul_of_parts(_product(layer.gate_up, x))
            is_last = index + 1 == len(model.layers)
            norm = model.final_norm if is_last else model.layers[index + 1].attention_norm
            x = add_rms_norm_of_parts(_product(layer.down, x), residual, norm, eps)
        return x

    def _takes(self, num_rows: int) -> bool:
        """Whether so many rows should go this way."""
        model = self._model
        return (
            model.config.hidden_size <= MAX_HIDDEN
            and fits_preloaded(model.embedding.device)
            and all(
                type(linear) is Linear
                and linear.weight.dtype.itemsize == 2
                and choose_preloaded(num_rows, *linear.weight.shape) is not None
                for layer in model.layers
                for linear in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
            )
        )


def _product(linear: LinearMap, x: Tensor) -> Tensor:
    assert type(linear) is Linear
    config = choose_preloaded(x.shape[0], *linear.weight.shape)
    assert config is not None
    return preloaded_linear(x, linear.weight, linear.bias, config)
