"""Decode steps whose tokens before the drafts are all known, and steps that may have drafts or not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.gpu.steps.decode_steps import LENGTH, DecodeOutput, DecodeSteps
from engine.gpu.steps.step import GpuBatch, GpuStep
from engine.query_steps.inputs import NUM_FIELDS, ROW, are_last_tokens, query_inputs, query_step_inputs
from engine.runner import Sampled, sampled_queries
from engine.wings import OnProgress


class QuerySteps(DecodeSteps):
    """Steps that get their tokens from the host. The next step may continue without knowing the sampled ones.

    is_grouped: see `query_step_inputs`.
    """

    num_fields = NUM_FIELDS
    is_grouped = True

    def queue(self, batch: GpuBatch, step: GpuStep) -> None:
        """See DecodeSteps."""
        output, _ = self._run_queries(batch, step.turn)
        step.takes_drafts = True
        self._samples.take(output.token_ids, output.logits, batch, self._sampled(batch), step)

    def places(self, batch: GpuBatch) -> tuple[Sequence[int], Sequence[int], int]:
        """See DecodeSteps."""
        of_row = [index for index, row in enumerate(batch.rows) for _ in range(row.num_tokens)]
        return of_row, range(len(of_row)), self._bucket_of(len(of_row))

    def _run_queries(self, batch: GpuBatch, turn: int) -> tuple[Any, int]:
        """Run a step. Returns its output and the number of queries."""
        queries = query_inputs(batch, self._block_size, self._num_groups, self._forward.attention.most_queries)
        num_queries = queries.shape[1]
        num_rows = self._bucket_of(num_queries)
        packed = self._staging[turn].numpy()
        packed[:, :num_rows] = 0
        packed[self._slot_fields, :num_rows] = -1
        packed[:, :num_queries] = queries
        return self._run(num_rows, turn), num_queries

    def _bucket_of(self, num_queries: int) -> int:
        """Return the padded number of rows of a step of `num_queries` queries."""
        return self._table.buckets[bisect_left(self._table.buckets, num_queries)]

    def _sampled(self, batch: GpuBatch) -> list[Sampled]:
        """Return the entries of the tokens that a step samples."""
        return sampled_queries(batch.rows, batch.requests, range(len(batch.rows)))

    def _compute(self, num_rows: int) -> Any:
        """See DecodeSteps. num_rows: number of queries."""
        queries, state = self._packed[:, :num_rows], self._state
        inputs = query_step_inputs(state, queries, self.is_grouped)
        logits = self._forward.logits(self._forward.hidden(inputs))
        rows = queries[ROW].long()
        sampled = self._samples.on_device.sample(logits, rows, queries[LENGTH])
        self._forward.observe(inputs, sampled)
        is_last, nobody = self._are_last(queries, rows, sampled), state.last_tokens.shape[0] - 1
        state.last_tokens[torch.where(is_last, rows, nobody)] = sampled.clamp(min=0)
        return DecodeOutput(sampled, logits)

    def _are_last(self, queries: Tensor, rows: Tensor, sampled: Tensor) -> Tensor:
        """Return whether each sampled token is the last one of its request, bool (n,)."""
        return are_last_tokens(queries, rows, sampled)


class DraftSteps(QuerySteps):
    """Steps that may have drafts; steps without drafts take the previous step's tokens from the device."""

    def __init__(self, *args: Any) -> None:
        """args: of DecodeSteps."""
        super().__init__(*args)
        self._without_drafts = DecodeSteps(*args)

    def capture(self, on_progress: OnProgress) -> None:
        """See DecodeSteps: the graphs of both kinds of steps."""

        def half(number: int, stage: str, done: float | None) -> None:
            on_progress(stage, None if done is None else (number + done) / 2)

        self._without_drafts.capture(partial(half, 0))
        super().capture(partial(half, 1))

    def queue(self, batch: GpuBatch, step: GpuStep) -> None:
        """See DecodeSteps."""
        if has_drafts(batch):
            super().queue(batch, step)
        else:
            step.takes_drafts = True
            self._without_drafts.queue(batch, step)

    def places(self, batch: GpuBatch) -> tuple[Sequence[int], Sequence[int], int]:
        """See DecodeSteps."""
        return super().places(batch) if has_drafts(batch) else self._without_drafts.places(batch)


def has_drafts(batch: GpuBatch) -> bool:
    """Whether any row of a step has drafts."""
    return any(row.draft_token_ids for row in batch.rows)
