"""The one loop over a model's ops, and the one place where a block's output meets the residual.

What differs between devices, row counts and quantizations is which op stands for a block. A lowering chooses it:
`engine/cpu/lowering.py`, `engine/gpu/lowering.py`, or `plain`, which runs anywhere and which the others are tested
against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from engine.layers.block import Step
from engine.layers.linear import LinearLayer
from engine.models.model import Model
from kernels.rms_norm import rms_norm

X = TypeVar("X")  # a body's input: the normed residual, plain or as quantized values and scales
S = TypeVar("S")  # the inputs of a step

AddNorm = Callable[[Tensor, Tensor | None], X]
"""(residual, pending) -> the RMS norm of their sum, which the residual becomes in place. pending is None (nothing),
plain (num_tokens, hidden), or split-K partials of that (num_splits, num_tokens, hidden)."""

Body = Callable[[X, S], Tensor]
"""(normed input, step) -> the block's output, in one of the forms of `pending`."""


@dataclass(slots=True)
class Stream:
    """What travels from op to op.

    residual: sum of the embedding and of all blocks' outputs but the last. pending: the last block's output.
    """

    residual: Tensor
    pending: Tensor | None = None

    def fold(self, add_norm: AddNorm[X]) -> X:
        """Add the pending output to the residual, and norm the sum.

        Every pending output passes here and nowhere else. With tensor parallelism it is a rank's share of a sum:
        this is where the all-reduce goes. (An op that adds to the residual itself, as the GEMVs of one row do, has
        no pending output, and is no op for a rank among several.)
        """
        x = add_norm(self.residual, self.pending)
        self.pending = None
        return x


Op = Callable[[Stream, S], Stream]
"""A block in the form that suits a device and a number of rows."""


def block_op(add_norm: AddNorm[X], body: Body[X, S]) -> Op[S]:
    """The usual op: fold, then compute. Bound methods and functions are called faster than objects."""

    def op(stream: Stream, step: S) -> Stream:
        stream.pending = body(stream.fold(add_norm), step)
        return stream

    return op


class Forward(Generic[S]):
    """A lowered model: tokens to hidden states, hidden states to logits. start: gives the first stream of a step."""

    def __init__(
        self, start: Callable[[S], Stream], ops: Sequence[Op[S]], final: AddNorm[Tensor], head: LinearLayer
    ) -> None:
        self._start = start
        self._ops = ops
        self._final = final
        self.logits = head  # normed hidden states (rows, hidden) -> (rows, vocab)

    def hidden(self, step: S) -> Tensor:
        """Hidden states (num_tokens, hidden) behind the final norm."""
        stream = self._start(step)
        for op in self._ops:
            stream = op(stream, step)
        return stream.fold(self._final)


def plain(model: Model) -> Forward[Step]:
    """The model as its family's file says it, on any device, with a residual in float32."""

    def start(step: Step) -> Stream:
        return Stream(model.embed(step.token_ids).float())

    ops = [block_op(plain_norm(block.norm, block.eps), block.__call__) for block in model.blocks]
    return Forward(start, ops, plain_norm(model.final_norm, model.config.rms_norm_eps), model.head)


def plain_norm(weight: Tensor, eps: float) -> AddNorm[Tensor]:
    """The result has the dtype of the norm's weight."""

    def add_norm(residual: Tensor, pending: Tensor | None) -> Tensor:
        if pending is not None:
            residual += pending
        return rms_norm(residual, weight, eps)

    return add_norm
