"""A decode step's forward pass on a CPU: `DecoderModel.forward` with fewer operations, for few rows.

With few rows the products take half of a step and starting the other operations the rest: a row of 576 numbers is
worked through in the time that Python needs to ask for it. So the residual stream is kept in the form that torch's
fused norm takes (`kernels/cpu_norm.py`). Where K and V live only the attention backend knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Union

import torch
from torch import Tensor
from torch.nn import functional

from engine.cpu.pool_attention import AttentionBackend, AttentionMetadata
from engine.layers.decoder import DecoderLayer, DecoderModel
from engine.layers.linear import Int4Linear, Int8Linear, LinearMap
from engine.layers.reordered import Reordered
from kernels.cpu_norm import add_opposed_, opposed, rms_norm_of_opposed, signs_like
from kernels.rms_norm import rms_norm
from kernels.rotary import rotate_
from kernels.silu_mul import silu_mul

MAX_ROWS = 64  # above, memory traffic counts and not the number of operations
Forward = Union["DecoderModel", "FewRowForward"]  # tokens to hidden states, hidden states to logits


class CpuForwards:
    """Chooses the forward pass of a step by what its rows are, not by how many there are.

    Prompts always take the plain pass and the dense copies of quantized weights: then each of their numbers is
    rounded in the same way however they are cut into steps and however much of them is cached, bit for bit.
    """

    def __init__(self, model: DecoderModel) -> None:
        self._plain = with_dense_maps(model)
        self._few_rows = FewRowForward(model)

    def choose(self, num_tokens: int, only_decodes: bool) -> Forward:
        """only_decodes: every row is one generated token."""
        return self._few_rows if only_decodes and num_tokens <= MAX_ROWS else self._plain


def with_dense_maps(model: DecoderModel) -> DecoderModel:
    """The model with the dense copies of its quantized maps, for any number of rows. Weights are shared."""
    dense = replace(model, layers=[replace(layer) for layer in model.layers])
    dense.replace_linear_maps(_dense_copy)
    return dense


def _dense_copy(linear: LinearMap) -> LinearMap:
    if isinstance(linear, Int4Linear | Int8Linear):
        return linear.dense
    if isinstance(linear, Reordered):
        return Reordered(_dense_copy(linear.inner), linear.order)
    return linear


@dataclass(slots=True)
class NormWeights:
    """Norm weights of one layer, each twice: float32 (2, hidden)."""

    attention: Tensor
    mlp: Tensor


class FewRowForward:
    """The model's forward pass for steps of at most `MAX_ROWS` tokens."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._signs = signs_like(model.embedding.new_empty(0, dtype=torch.float32))
        self._dtype = model.embedding.dtype
        self._norms = [NormWeights(_twice(layer.attention_norm), _twice(layer.mlp_norm)) for layer in model.layers]
        self._final_norm = _twice(model.final_norm)

    def forward(
        self, token_ids: Tensor, positions: Tensor, backend: AttentionBackend, metadata: AttentionMetadata
    ) -> Tensor:
        """token_ids, positions (num_tokens,) -> float32 stream (num_tokens, 2, hidden): each row, its negative."""
        model, signs, eps, dtype = self._model, self._signs, self._model.config.rms_norm_eps, self._dtype
        table = model.rotary[positions]
        cos, sin = table[:, :1], table[:, 1:]
        stream = opposed(functional.embedding(token_ids, model.embedding), signs)  # float32, as signs are
        for index, (layer, norms) in enumerate(zip(model.layers, self._norms, strict=True)):
            qkv = self._qkv(layer, rms_norm_of_opposed(stream, norms.attention, eps, dtype), cos, sin)
            add_opposed_(stream, layer.attention_output(backend.attend(index, qkv, metadata)), signs)
            gate_up = layer.gate_up(rms_norm_of_opposed(stream, norms.mlp, eps, dtype))
            add_opposed_(stream, layer.down(silu_mul(gate_up)), signs)
        return stream

    def logits(self, stream: Tensor) -> Tensor:
        """Rows of `forward`'s result -> logits (rows, vocab)."""
        model = self._model
        eps, dtype = model.config.rms_norm_eps, model.final_norm.dtype
        return model.lm_head(rms_norm_of_opposed(stream, self._final_norm, eps, dtype))

    def _qkv(self, layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(num_tokens, hidden) -> q, k, v heads (num_tokens, heads + 2 kv_heads, head_dim), q and k rotated."""
        config = self._model.config
        qkv = layer.qkv(x).view(x.shape[0], -1, config.head_dim)
        qk = qkv[:, : config.num_heads + config.num_kv_heads]
        if layer.qk_norm is not None:
            qk.copy_(rms_norm(qk, layer.qk_norm, config.rms_norm_eps))
        rotate_(qk, cos, sin)
        return qkv


def _twice(weight: Tensor) -> Tensor:
    return torch.stack([weight, weight]).float()
