"""What a lowered model does at the ends of a pipeline stage, which has consecutive layers of it (decision 0235).

    in     a later stage's inbox stands for the embedding, and token i of a step is row i of it
    out    what goes on is the residual, all outputs added: a sum without a norm in the place of the final norm
    tokens are sampled by the last stage, the one that has the final norm and the head

Ops in between know nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` stages, in the order of layers."""

    index: int
    count: int


class HiddenSource(Protocol):
    """The stage before."""

    def receive(self, hidden: Tensor) -> None:
        """Fill `hidden` (num_tokens, hidden) with the next step's, or queue that on the current stream."""
        ...


class HiddenSink(Protocol):
    """The stage behind."""

    def send(self, hidden: Tensor) -> None:
        """Send a step's (num_tokens, hidden), which may be overwritten as soon as this returns."""
        ...


@dataclass(frozen=True, slots=True)
class StageEnds:
    """A stage's neighbours: none before the first one, none behind the last one."""

    source: HiddenSource | None = None
    sink: HiddenSink | None = None

    @property
    def samples(self) -> bool:
        return self.sink is None


WHOLE_MODEL = StageEnds()


class Inbox:
    """Hidden states of a step, which ops read where the first stage's read the embedding."""

    def __init__(self, source: HiddenSource, table: Tensor) -> None:
        """table: zeros (most tokens of a step, hidden)."""
        self._source = source
        self._table = table
        self._rows = torch.arange(table.shape[0], device=table.device)

    def receive(self, num_tokens: int) -> None:
        """Take the next step's."""
        self._source.receive(self._table[:num_tokens])

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Rows (num_tokens, hidden) of as many tokens; they may be changed in place."""
        return self._table[: token_ids.shape[0]]

    def token_ids(self, num_tokens: int) -> Tensor:
        """What stands for a step's token ids (num_tokens,) where the table stands for the embedding."""
        return self._rows[:num_tokens]
