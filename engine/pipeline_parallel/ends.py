"""What a lowered model does at the ends of a pipeline stage, which has consecutive layers of it.

    in     a later stage's inbox replaces the embedding: token i of a step is row i of it
    out    the residual is passed on, with all outputs added: a sum without a norm replaces the final norm
    tokens are sampled by the last stage, which has the final norm and the head

The ops between the ends are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from engine.layers.block import Step
from engine.layers.forward import Forward, Stream, plain_sum
from engine.models.model import Model
from engine.plan import ScheduledRow
from engine.ranks import Inbox, Seams


class HiddenSource(Protocol):
    """The previous stage."""

    def receive(self, hidden: Tensor) -> None:
        """Fill `hidden` (num_tokens, hidden) with the next step's, or queue that on the current stream."""
        ...


class HiddenInbox(Inbox):
    """A step's hidden states, which ops read where the first stage reads the embedding."""

    def __init__(self, source: HiddenSource, table: Tensor) -> None:
        """table: zeros (most tokens of a step, hidden)."""
        self._source = source
        self._table = table
        self._rows = torch.arange(table.shape[0], device=table.device)

    def receive(self, rows: Sequence[ScheduledRow]) -> None:
        self._source.receive(self._table[: sum(row.num_tokens for row in rows)])

    def start(self, step: Step) -> Stream[Tensor]:
        """Return the stream of a step on a CPU, whose table is in float32 and is changed in place."""
        return Stream(self._table[: step.token_ids.shape[0]])

    def model(self, model: Model) -> Model:
        """See Inbox. The first stage has scaled the embedding already."""
        return replace(model, embedding=self._table, embedding_scale=None)

    def token_ids(self, token_ids: Tensor) -> Tensor:
        return self._rows[: token_ids.shape[0]]


class StageSeams(Seams):
    """Seams of one of several stages on CPUs."""

    def __init__(self, within: Seams, inbox: Inbox, passes_on: bool) -> None:
        """within: between the ranks of the stage."""
        self._within, self._inbox, self._passes_on = within, inbox, passes_on

    def lowered(self, form: Forward[Step, Tensor], model: Model) -> Forward[Step, Tensor]:
        """See Seams. The last stage has the final norm."""
        form = self._within.lowered(replace(form, final=plain_sum) if self._passes_on else form, model)
        if isinstance(self._inbox, HiddenInbox):
            form = replace(form, start=self._inbox.start)
        return form
