"""The one loop over a model's ops, and the one place where a block's output is added to the residual.

Devices, row counts and quantizations differ only in the op that computes a block. A lowering chooses it:
`engine/cpu_forms/forms.py`, `engine/gpu/lowering.py`, or `plain`, which runs anywhere and is the reference in tests
of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.layers.block import AddNorm, Step
from engine.layers.linear import LinearLayer
from engine.models.model import Model
from kernels.elementwise import rms_norm

X = TypeVar("X")  # a body's input: the normed residual, plain or as quantized values and scales
S = TypeVar("S")  # the inputs of a step
P = TypeVar("P")  # a block's output until it is added: a tensor, or on a GPU `engine.gpu.ops.rules.Pending`


class Stream(NamedTuple, Generic[P]):
    """The state between two ops.

    residual: sum of the embedding and of all blocks' outputs except the last. pending: the last block's output.
    """

    residual: Tensor
    pending: P | None = None


class Op(NamedTuple, Generic[X, S, P]):
    """A block in a form for some device and number of rows: `fold` makes its input, `body` computes its output."""

    fold: Callable[[Tensor, P | None], X]
    body: Callable[[X, S], P | None]


@dataclass(frozen=True, slots=True)
class Forward(Generic[S, P]):
    """A lowered model: tokens to hidden states, hidden states to logits."""

    start: Callable[[S], Stream[P]]
    ops: Sequence[Op[Any, S, P]]  # their inputs may be of different types
    final: Callable[[Tensor, P | None], Tensor]
    logits: LinearLayer  # normed hidden states (rows, hidden) -> (rows, vocab)
    end: Callable[[Tensor, S], Tensor] = lambda x, step: x  # makes the hidden states from the output of `final`

    def hidden(self, step: S) -> Tensor:
        """Hidden states (num_tokens, hidden) after the final norm.

        Each block's input and output are dropped as soon as they are read, to keep peak memory low. Every output is
        added to the residual in a fold: with tensor parallelism the output is a rank's partial sum, and the fold
        begins with an all-reduce. (The GEMVs of one row add to the residual themselves; a rank among several does
        not use them.)
        """
        return self.end(self.final(*self._stream(step)), step)

    def _stream(self, step: S) -> Stream[P]:
        """Run all ops and return the last stream."""
        residual, pending = self.start(step)
        for fold, body in self.ops:
            x, pending = fold(residual, pending), None
            x, pending = None, body(x, step)
        return Stream(residual, pending)

    def narrowed(self, count: int, narrow: Callable[[Stream[P], S], Stream[P]]) -> Forward[S, P]:
        """Return this forward pass with `narrow` applied to the stream before the last `count` ops."""
        split = len(self.ops) - count
        first = replace(self, ops=self.ops[:split])
        return replace(self, start=lambda step: narrow(first._stream(step), step), ops=self.ops[split:])


def plain_sum(residual: Tensor, pending: Tensor | None) -> Tensor:
    """Add the pending output to the residual: an AddNorm without a norm."""
    if pending is not None:
        residual += pending
    return residual


def plain_norm(weight: Tensor, eps: float, dtype: torch.dtype) -> AddNorm[Tensor]:
    """Return an AddNorm whose result has `dtype`, which is mostly the weight's."""
    return lambda residual, pending: rms_norm(plain_sum(residual, pending), weight, eps).to(dtype)


MakeNorm = Callable[[Tensor, float, torch.dtype], AddNorm[Tensor]]
"""(weight, eps, dtype of the result) -> the function that adds a block's output to the residual and norms it."""


def plain(model: Model, norm: MakeNorm = plain_norm) -> Forward[Step, Tensor]:
    """Lower a model to the blocks that its family's file yields, on any device, with a residual in float32."""
    dtype = model.embedding.dtype
    ops = [Op(norm(block.norm, block.eps, dtype), block.__call__) for block in model.blocks]
    final = norm(model.final_norm, model.config.rms_norm_eps, model.hidden_dtype)
    return Forward(lambda step: Stream(model.embed(step.token_ids).float()), ops, final, model.head)
