"""What a lowered model does between the ranks of a tensor-parallel group, at its three seams.

embedding   each rank looks up tokens in its rows of the vocabulary, and an all-reduce adds the results
fold        a block's output is a rank's share of a sum, which is reduced before it is added to the residual
head        each rank has the logits of its rows of the vocabulary, and an all-gather joins them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from engine.expert_balancing.moves import ExpertGroup
from engine.layers.block import Block, Step
from engine.layers.forward import Forward, Op, Stream
from engine.post_norms.post_norm import PostNormed
from engine.ranks import Seams

if TYPE_CHECKING:
    from engine.layers.block import AddNorm
    from engine.models.model import Model

X = TypeVar("X")


class Group(ExpertGroup, Protocol):
    """The ranks of one model on CPUs, which call the same methods in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks in float32. The result is bitwise equal on all ranks."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate each rank's (n, columns) to (n, size * columns), in the order of ranks."""
        ...


class WholeRows(Seams):
    """Seams of ranks that all have every row."""

    def __init__(self, group: Group, vocab_size: int) -> None:
        """vocab_size: of the whole model."""
        self._group, self._vocab_size = group, vocab_size

    def lowered(self, form: Forward[Step, Tensor], model: Model) -> Forward[Step, Tensor]:
        """See Seams. The last rank's logits may be padded."""
        blocks, embed, head = model.blocks, self._embedding(model), form.logits

        def start(step: Step) -> Stream[Tensor]:
            return Stream(self.start(embed(step.token_ids).float()))

        def all_logits(x: Tensor) -> Tensor:
            return self._group.all_gather(head(x))[:, : self._vocab_size]

        ops = [
            Op(self.fold(op.fold, before), self.body(op, block))
            for before, op, block in zip([None, *blocks], form.ops, blocks, strict=False)
        ]
        return Forward(start, ops, self.fold(form.final, blocks[-1]), all_logits, self.end)

    def start(self, x: Tensor) -> Tensor:
        """Return the rows of the first residual that this rank keeps."""
        return x

    def fold(self, add_norm: AddNorm[X], before: Block | None) -> AddNorm[X]:
        """Return `add_norm` of the sum of all ranks' pending outputs, which block `before` leaves."""

        def sum_add_norm(residual: Tensor, pending: Tensor | None) -> X:
            return add_norm(residual, None if pending is None else self._group.all_reduce(pending))

        return sum_add_norm

    def body(self, op: Op[Tensor, Step, Tensor], block: Block) -> Callable[[Tensor, Step], Tensor | None]:
        """Return the function from this rank's normed rows to its share of the block's output, which is a sum.

        An output that is normed before it is added is summed here: the first rank then returns all of it, the others
        zeros.
        """
        if not isinstance(block, PostNormed):
            return op.body

        def norm_sum(x: Tensor, step: Step) -> Tensor:
            y = self._group.all_reduce(block.inner(x, step))
            return block.normed(y).to(x.dtype) if self._group.rank == 0 else torch.zeros_like(x)

        return norm_sum

    def end(self, x: Tensor, step: Step) -> Tensor:
        """Return all rows (num_tokens, hidden) after the final norm."""
        return x

    def _embedding(self, model: Model) -> Callable[[Tensor], Tensor]:
        """Return the lookup in the whole embedding, of which the model has this rank's rows."""
        group, count = self._group, model.embedding.shape[0]
        first = group.rank * count

        def look_up(token_ids: Tensor) -> Tensor:
            local = token_ids - first
            is_mine = (local >= 0) & (local < count)
            return group.all_reduce(model.embed(local.clamp(0, count - 1)) * is_mine[:, None])

        return look_up
