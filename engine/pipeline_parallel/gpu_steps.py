"""Decode steps of a pipeline stage, which get all tokens from the host: one step of each request is in flight."""

from __future__ import annotations

from typing import Any

from engine.gpu.steps.step import GpuBatch, GpuStep
from engine.query_steps.inputs import query_step_inputs
from engine.query_steps.steps import QuerySteps
from engine.ranks import RankContext


class StageSteps(QuerySteps):
    """See QuerySteps. All stages except the last pass hidden states on and sample nothing."""

    def __init__(self, ranks: RankContext[Any], is_grouped: bool, *args: Any) -> None:
        """is_grouped: if there are drafts. args: of DecodeSteps."""
        self._ranks, self.is_grouped = ranks, is_grouped
        super().__init__(*args)

    def queue(self, batch: GpuBatch, step: GpuStep) -> None:
        """See DecodeSteps."""
        if not self._ranks.passes_on:
            super().queue(batch, step)
            return
        hidden, num_queries = self._run_queries(batch, step.turn)
        self._ranks.pass_on(hidden[:num_queries])

    def _compute(self, num_rows: int) -> Any:
        """See DecodeSteps; returns hidden states (num_rows, hidden) if they are passed on."""
        if not self._ranks.passes_on:
            return super()._compute(num_rows)
        return self._forward.hidden(query_step_inputs(self._state, self._packed[:, :num_rows], self.is_grouped))
