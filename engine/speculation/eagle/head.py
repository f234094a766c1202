"""The layer of an EAGLE-3 head, in plain torch.

With x_t a token and r_t the residuals that enter some of the model's layers, f_t = W_fc [r_t of each layer]. At
position t the head computes a decoder layer over [norm(embedding of x_t+1), norm(f_t)], with f_t as the residual. Its
output o_t gives the logits of x_t+2 over the head's own vocabulary. Beyond the model's last token, o_t-1 replaces
f_t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear import Linear
from engine.layers.rotary import Rotation, rotary_table
from engine.models.config import RopeConfig
from engine.speculation.heads.kv import HeadKv, attend_last
from kernels.elementwise import rms_norm, rotate_, silu_mul

FIRST_POSITIONS = 64  # positions of the rotary table, which grows on demand


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The shape of a head. layers: the model's layers whose inputs it reads, in rising order; one may occur twice."""

    layers: tuple[int, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: RopeConfig
    norms_residual: bool = False  # the residual of the layer is norm(f_t), not f_t


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of a head. embedding: (vocab, hidden), usually the model's own. token_ids: (draft vocab,) int64,
    the model's token for each of the head's tokens; None: the vocabularies are equal.
    """

    fc: Linear
    embedding: Tensor
    input_norm: Tensor
    hidden_norm: Tensor
    q: Linear
    kv: Linear  # K, then V
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    norm: Tensor
    head: Linear
    token_ids: Tensor | None


class EagleHead:
    """See `Head`."""

    def __init__(self, shape: HeadShape, weights: HeadWeights) -> None:
        self.shape, self.weights, self.token_ids = shape, weights, weights.token_ids
        self.layers = tuple(sorted(set(shape.layers)))  # without repetitions, as a runner reads them
        self._order = [self.layers.index(layer) for layer in shape.layers]
        self._rotary = self._table(FIRST_POSITIONS)

    def join(self, residuals: Sequence[Tensor]) -> Tensor:
        """See Head."""
        dtype = self.weights.input_norm.dtype
        return self.weights.fc(torch.cat([residuals[index].to(dtype) for index in self._order], dim=-1))

    def inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """See Head: (n, 2 hidden)."""
        held, eps = self.weights, self.shape.eps
        embedded = functional.embedding(token_ids, held.embedding)
        return torch.cat([rms_norm(embedded, held.input_norm, eps), rms_norm(hidden, held.hidden_norm, eps)], dim=-1)

    def keys_and_values(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """See Head: K and V."""
        shape = self.shape
        kv = self.weights.kv(inputs).view(-1, 2 * shape.num_kv_heads, shape.head_dim)
        rotate_(kv[:, : shape.num_kv_heads], *self._rotation(positions))
        return kv.view(-1, 2, shape.num_kv_heads, shape.head_dim)

    def outputs(self, inputs: Tensor, hidden: Tensor, positions: Tensor, kvs: Sequence[HeadKv]) -> Tensor:
        """See Head."""
        held, shape = self.weights, self.shape
        q = held.q(inputs).view(-1, shape.num_heads, shape.head_dim)
        rotate_(q, *self._rotation(positions))
        attended = torch.stack([attend_last(row, *kv.held) for kv, row in zip(kvs, q, strict=True)])
        residual = inputs[:, shape.hidden_size :] if shape.norms_residual else hidden
        residual = residual + held.output(attended.flatten(1))
        return residual + held.down(silu_mul(held.gate_up(rms_norm(residual, held.mlp_norm, shape.eps))))

    def logits(self, outputs: Tensor) -> Tensor:
        """See Head."""
        return self.weights.head(rms_norm(outputs, self.weights.norm, self.shape.eps))

    def _rotation(self, positions: Tensor) -> Rotation:
        last = int(positions.max())
        if last >= self._rotary.shape[0]:
            self._rotary = self._table(2 * last)
        return Rotation.of(self._rotary, positions)

    def _table(self, num_positions: int) -> Tensor:
        return rotary_table(
            self.shape.rope, self.shape.head_dim, num_positions, torch.float32, self.weights.norm.device
        )
