"""What a lowered model does between ranks that divide a step's rows and dispatch them to experts.

    embedding          summed over ranks; a rank keeps its rows, the only ones in its residual
    fold               after attention and MLPs, a rank's rows of the sum; outputs of experts are complete
    attention, MLPs    of all ranks' normed rows, gathered
    experts            of a rank's rows, see `engine/expert_parallel/exchange.py`
    final norm         gathered

Blocks know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.expert_parallel.exchange import ExpertExchange
from engine.layers.block import Block, Step
from engine.moe.moe import Moe
from engine.tensor_parallel.seams import Group, WholeRows, X

if TYPE_CHECKING:
    from engine.layers.block import AddNorm
    from engine.layers.forward import Op
    from engine.models.model import Model


def seams_of(model: Model, group: Group, vocab_size: int) -> WholeRows:
    """Return the seams of the model's shard. vocab_size: of the whole model."""
    moe = model.config.moe
    if moe is not None and moe.exchange == "dispatch":
        num_slots = max(block.rule.num_slots for block in model.blocks if isinstance(block, Moe))  # the same in all
        return DividedRows(group, vocab_size, ExpertExchange(group, num_slots))
    return WholeRows(group, vocab_size)


class DividedRows(WholeRows):
    """Seams of ranks that divide rows: rank r has rows r n to (r + 1) n - 1 of a step, n = ceil(rows / ranks)."""

    def __init__(self, group: Group, vocab_size: int, exchange: ExpertExchange) -> None:
        super().__init__(group, vocab_size)
        self._exchange = exchange

    def start(self, x: Tensor) -> Tensor:
        counts = rows_of_ranks(x.shape[0], self._group.size)
        return torch.split(x, counts)[self._group.rank]

    def fold(self, add_norm: AddNorm[X], before: Block | None) -> AddNorm[X]:
        if before is None or isinstance(before, Moe):
            return add_norm

        def add_own_rows(residual: Tensor, pending: Tensor | None) -> X:
            return add_norm(residual, None if pending is None else self._sum_of_own(pending))

        return add_own_rows

    def body(self, op: Op[Tensor, Step, Tensor], block: Block) -> Callable[[Tensor, Step], Tensor | None]:
        if isinstance(block, Moe):
            return lambda x, step: self._exchange.output(block, x, self._counts(step))
        whole = super().body(op, block)
        return lambda x, step: whole(self.end(x, step), step)

    def end(self, x: Tensor, step: Step) -> Tensor:
        counts = self._counts(step)
        return self._group.all_to_all(x.repeat(self._group.size, 1), [x.shape[0]] * self._group.size, counts)

    def _counts(self, step: Step) -> list[int]:
        return rows_of_ranks(step.token_ids.shape[0], self._group.size)

    def _sum_of_own(self, pending: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks, float32."""
        group = self._group
        counts = rows_of_ranks(pending.shape[0], group.size)
        own = counts[group.rank]
        parts = group.all_to_all(pending.float(), counts, [own] * group.size)
        total: Tensor = torch.sum(parts.view(group.size, own, pending.shape[1]), dim=0)
        return total


def rows_of_ranks(num_rows: int, size: int) -> list[int]:
    """Return how many of a step's rows each rank has."""
    most = -(-num_rows // size)
    return [max(0, min(most, num_rows - rank * most)) for rank in range(size)]
