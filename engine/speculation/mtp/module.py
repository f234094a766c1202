"""A module for multi-token prediction, in plain torch: a decoder layer over the model's hidden states.

With h_t the model's normed hidden state of token x_t, the module computes a decoder layer at position t over

    W [norm(embedding of x_t+1), norm(h_t)]

which is also the residual. Its normed output is o_t, from which the model's head computes the logits of x_t+2. The
same module computes the drafts after the first, with o_t-1 in place of h_t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.attention import AttentionBlock
from engine.layers.block import Attend, Block, Step
from engine.layers.linear import Linear
from engine.layers.rotary import Rotation
from engine.speculation.heads.kv import HeadKv, attend_last
from kernels.elementwise import rms_norm


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The weights of a module. model_norm, rotary: the model's; embedding (vocab, hidden) and head usually, too.
    joint: W. blocks: of the decoder layer. hidden_dtype: of the head's input.
    """

    model_norm: Tensor
    rotary: Tensor
    embedding: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    joint: Linear
    blocks: Sequence[Block]
    norm: Tensor
    head: Linear
    hidden_dtype: torch.dtype


class MtpModule:
    """See `Head`."""

    token_ids = None

    def __init__(self, weights: ModuleWeights, num_layers: int, eps: float) -> None:
        """num_layers: of the model. eps: of its norms."""
        attention = weights.blocks[0].inner
        assert isinstance(attention, AttentionBlock), "a decoder layer begins with attention"
        self.layers = (num_layers,)
        self.weights, self.attention, self._eps = weights, attention, eps

    def join(self, residuals: Sequence[Tensor]) -> Tensor:
        """See Head: the model's hidden states."""
        return rms_norm(residuals[0], self.weights.model_norm, self._eps)

    def inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """See Head: (n, hidden)."""
        held, eps = self.weights, self._eps
        embedded = functional.embedding(token_ids, held.embedding)
        normed = rms_norm(embedded, held.embedding_norm, eps), rms_norm(hidden, held.hidden_norm, eps)
        return held.joint(torch.cat(normed, dim=-1))

    def keys_and_values(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """See Head: as the model's pool keeps them."""
        rotation, kept = self._rotation(positions), []

        def attend(block: AttentionBlock, qkv: Tensor) -> Tensor:
            q, kv = block.heads(qkv, rotation)
            kept.append(kv)
            _, values = block.context(kv[:1].permute(1, 2, 0, 3))
            return block.outputs(q.new_zeros(1, q.shape[1], values.shape[2]))  # the result is not used

        self._run(self.attention, inputs, attend)
        return kept[0]

    def outputs(self, inputs: Tensor, hidden: Tensor, positions: Tensor, kvs: Sequence[HeadKv]) -> Tensor:
        """See Head: the normed o."""
        held, rotation, residual = self.weights, self._rotation(positions), inputs.float()

        def attend(block: AttentionBlock, qkv: Tensor) -> Tensor:
            q, _ = block.heads(qkv, rotation)
            rows = zip(q, kvs, strict=True)
            return block.outputs(torch.stack([attend_last(row, *block.context(kv.held)) for row, kv in rows]))

        for block in held.blocks:
            residual = residual + self._run(block, residual, attend)
        return rms_norm(residual, held.norm, self._eps)

    def logits(self, outputs: Tensor) -> Tensor:
        """See Head."""
        return self.weights.head(outputs.to(self.weights.hidden_dtype))

    def _run(self, block: Block, residual: Tensor, attend: Attend) -> Tensor:
        no_tokens = torch.empty(0, dtype=torch.int64)  # blocks do not read them
        return block(rms_norm(residual, block.norm, block.eps), Step(no_tokens, no_tokens, attend))

    def _rotation(self, positions: Tensor) -> Rotation:
        """Return the rotation, clamped to the table: drafts beyond the model's last position are never accepted."""
        table = self.weights.rotary
        return Rotation.of(table, positions.clamp(max=table.shape[0] - 1))
