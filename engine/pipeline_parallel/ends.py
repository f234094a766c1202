"""What a lowered model does at the ends of a pipeline stage, which has consecutive layers of it.

    in     a later stage's inbox stands for the embedding, and token i of a step is row i of it
    out    what goes on is the residual, all outputs added: a sum without a norm in the place of the final norm
    tokens are sampled by the last stage, the one that has the final norm and the head

Ops in between know nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from engine.models.model import Model
from engine.plan import ScheduledRow
from engine.ranks import Inbox, LookUp


class HiddenSource(Protocol):
    """The stage before."""

    def receive(self, hidden: Tensor) -> None:
        """Fill `hidden` (num_tokens, hidden) with the next step's, or queue that on the current stream."""
        ...


class HiddenInbox(Inbox):
    """Hidden states of a step, which ops read where the first stage's read the embedding."""

    def __init__(self, source: HiddenSource, table: Tensor) -> None:
        """table: zeros (most tokens of a step, hidden)."""
        self._source = source
        self._table = table
        self._rows = torch.arange(table.shape[0], device=table.device)

    def receive(self, rows: Sequence[ScheduledRow]) -> None:
        self._source.receive(self._table[: sum(row.num_tokens for row in rows)])

    def look_up(self, embedding: LookUp) -> LookUp:
        return lambda token_ids: self._table[: token_ids.shape[0]]

    def model(self, model: Model) -> Model:
        """See Inbox. The first stage has scaled the embedding's rows."""
        return replace(model, embedding=self._table, embedding_scale=None)

    def token_ids(self, token_ids: Tensor) -> Tensor:
        return self._rows[: token_ids.shape[0]]
