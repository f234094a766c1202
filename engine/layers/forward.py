"""The one loop over a model's ops, and the one place where a block's output meets the residual.

What differs between devices, row counts and quantizations is which op stands for a block. A lowering chooses it:
`engine/cpu/lowering.py`, `engine/gpu/lowering.py`, or `plain`, which runs anywhere and which the others are tested
against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from engine.layers.block import Step
from engine.layers.linear import LinearLayer
from engine.layers.parallel import Group, embedding_lookup, gathered, summed
from engine.models.model import Model
from kernels.rms_norm import rms_norm

X = TypeVar("X")
X_co = TypeVar("X_co", covariant=True)
X_contra = TypeVar("X_contra", contravariant=True)
S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)


class AddNorm(Protocol[X_co]):
    """Adds `pending`, if there is any, to `residual` in place, and returns the RMS norm of the sum.

    In which form (plain, quantized values and scales) is up to the op that reads it. `pending` is plain
    (num_tokens, hidden), or split-K partials of that (num_splits, num_tokens, hidden).
    """

    def __call__(self, residual: Tensor, pending: Tensor | None) -> X_co: ...


@dataclass(slots=True)
class Stream:
    """What travels from op to op.

    residual: sum of the embedding and of all blocks' outputs but the last. pending: the last block's output.
    """

    residual: Tensor
    pending: Tensor | None = None

    def fold(self, add_norm: AddNorm[X]) -> X:
        """Add the pending output to the residual, and norm the sum.

        Every pending output passes here and nowhere else. With tensor parallelism it is a rank's share of a sum, and
        `add_norm` sums over ranks first (`engine/layers/parallel.py`). (An op that adds to the residual itself, as
        the GEMVs of one row do, has no pending output, and is no op for a rank among several.)
        """
        x = add_norm(self.residual, self.pending)
        self.pending = None
        return x


class Body(Protocol[X_contra, S_contra]):
    """What a block computes of its normed input: (num_tokens, hidden) in any form of `pending`."""

    def __call__(self, x: X_contra, step: S_contra) -> Tensor: ...


class Op(Protocol[S_contra]):
    """A block in the form that suits a device and a number of rows."""

    def __call__(self, stream: Stream, step: S_contra) -> Stream: ...


class BlockOp(Generic[X, S]):
    """The usual op: fold, then compute."""

    def __init__(self, add_norm: AddNorm[X], body: Body[X, S]) -> None:
        self._add_norm = add_norm
        self._body = body

    def __call__(self, stream: Stream, step: S) -> Stream:
        stream.pending = self._body(stream.fold(self._add_norm), step)
        return stream


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


class PlainNorm:
    """`AddNorm` in torch. The residual is float32, the result has the dtype of the norm's weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, residual: Tensor, pending: Tensor | None) -> Tensor:
        if pending is not None:
            residual += pending
        return rms_norm(residual, self._weight, self._eps)


def plain(model: Model, group: Group | None = None, vocab_size: int = 0) -> Forward[Step]:
    """The model as its family's file says it, on any device.

    group: of the ranks that hold the other shards; vocab_size: of the whole model, with a group.
    """
    embed = embedding_lookup(model.embedding, group)

    def start(step: Step) -> Stream:
        return Stream(embed(step.token_ids).float())

    ops = [BlockOp(summed(PlainNorm(block.norm, block.eps), group), block) for block in model.blocks]
    final = summed(PlainNorm(model.final_norm, model.config.rms_norm_eps), group)
    return Forward(start, ops, final, gathered(model.head, vocab_size, group))
