"""Decode steps of a pipeline stage, which is given all tokens: one step is in flight of each request."""

from __future__ import annotations

from typing import Any

from engine.gpu.steps.step import GpuBatch, GpuStep
from engine.query_steps.inputs import query_step_inputs
from engine.query_steps.steps import QuerySteps
from engine.ranks import RankContext


class StageSteps(QuerySteps):
    """See QuerySteps. A stage that another one follows passes hidden states on, and samples nothing."""

    def __init__(self, ranks: RankContext[Any], is_grouped: bool, *args: Any) -> None:
        """is_grouped: where there are drafts. args: of DecodeSteps."""
        self._ranks, self.is_grouped = ranks, is_grouped
        super().__init__(*args)

    def queue(self, batch: GpuBatch, turn: int, step: GpuStep) -> None:
        """See DecodeSteps."""
        if not self._ranks.passes_on:
            super().queue(batch, turn, step)
            return
        hidden, num_queries = self._run_queries(batch, turn)
        self._ranks.pass_on(hidden[:num_queries])

    def _compute(self, num_rows: int) -> Any:
        """See DecodeSteps; hidden states (num_rows, hidden) where they are passed on."""
        if not self._ranks.passes_on:
            return super()._compute(num_rows)
        return self._forward.hidden(query_step_inputs(self._rows.state, self._packed[:, :num_rows], self.is_grouped))
