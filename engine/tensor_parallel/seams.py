"""What a lowered model does between the ranks of a tensor-parallel group, at its three seams.

    embedding   each rank looks up the tokens of its rows of the vocabulary, and all add up
    fold        a block's output is a rank's share of a sum: summed before it meets the residual
    head        each rank has the logits of its rows of the vocabulary, and all put them beside each other

Ops in between know nothing of it. Without a group each function gives back what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from engine.layers.block import Block, Step
from engine.layers.post_norm import PostNormed

if TYPE_CHECKING:
    from engine.layers.forward import AddNorm
    from engine.layers.linear import LinearLayer
    from engine.models.model import Model

X_co = TypeVar("X_co", covariant=True)


class Group(Protocol):
    """The ranks of one model, which call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in float32. Equal on all ranks, bit for bit."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """(n, columns) of each rank -> (n, size * columns), in the order of ranks."""
        ...

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Rows of x (sum(send), columns) for each rank, in their order -> (sum(receive), columns), from each rank."""
        ...


class Seams(Protocol):
    """What goes on between ranks at a step's beginning and end, before a block and in it."""

    def start(self, x: Tensor) -> Tensor:
        """The rows, dimension 0 of the first residual, that this rank keeps."""
        ...

    def fold(self, add_norm: AddNorm[X_co], before: Block | None) -> AddNorm[X_co]:
        """`add_norm` of what the block before leaves pending on this rank."""
        ...

    def body(self, block: Block) -> Callable[[Tensor, Step], Tensor]:
        """The block, from normed rows of this rank to what the next fold takes."""
        ...

    def end(self, x: Tensor, step: Step) -> Tensor:
        """All rows (num_tokens, hidden) behind the final norm."""
        ...


class WholeRows:
    """A `Seams`: every rank has every row."""

    def __init__(self, group: Group | None) -> None:
        self._group = group

    def start(self, x: Tensor) -> Tensor:
        """See Seams."""
        return x

    def fold(self, add_norm: AddNorm[X_co], before: Block | None) -> AddNorm[X_co]:
        """See Seams."""
        return summed(add_norm, self._group)

    def body(self, block: Block) -> Callable[[Tensor, Step], Tensor]:
        """See Seams."""
        return rank_body(block, self._group)

    def end(self, x: Tensor, step: Step) -> Tensor:
        """See Seams."""
        return x


def embedding_lookup(model: Model, group: Group | None) -> Callable[[Tensor], Tensor]:
    """From token ids (n,) to rows (n, hidden). With a group, the model has this rank's rows of the vocabulary."""
    if group is None:
        return model.embed
    count = model.embedding.shape[0]
    first = group.rank * count

    def look_up(token_ids: Tensor) -> Tensor:
        local = token_ids - first
        is_mine = (local >= 0) & (local < count)
        return group.all_reduce(model.embed(local.clamp(0, count - 1)) * is_mine[:, None])

    return look_up


def summed(add_norm: AddNorm[X_co], group: Group | None) -> AddNorm[X_co]:
    """`add_norm` of the sum of all ranks' pending outputs."""
    if group is None:
        return add_norm

    def sum_add_norm(residual: Tensor, pending: Tensor | None) -> X_co:
        return add_norm(residual, None if pending is None else group.all_reduce(pending))

    return sum_add_norm


def rank_body(block: Block, group: Group | None) -> Callable[[Tensor, Step], Tensor]:
    """The block, whose output is this rank's share of a sum.

    What is normed before it is added has to be summed before: the first rank has all of it then, and others nothing.
    """
    if group is None or not isinstance(block, PostNormed):
        return block.__call__

    def norm_sum(x: Tensor, step: Step) -> Tensor:
        y = group.all_reduce(block.inner(x, step))
        return block.normed(y).to(x.dtype) if group.rank == 0 else torch.zeros_like(x)

    return norm_sum


def gathered(head: LinearLayer, vocab_size: int, group: Group | None) -> LinearLayer:
    """All logits (n, vocab_size) from the head's (n, rows of this rank); the last rank's may be padded."""
    if group is None:
        return head

    def all_logits(x: Tensor) -> Tensor:
        return group.all_gather(head(x))[:, :vocab_size]

    return all_logits
