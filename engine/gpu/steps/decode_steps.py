"""Steps of decode rows: inputs packed on the host, one copy to the device, then one graph where there are graphs.

A step that is being filled, and those in flight, have a buffer of pinned memory each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.gpu.forward import FusedForward
from engine.gpu.sampling.device_sampler import DeviceSampler
from engine.gpu.steps.graphs import (
    LENGTH,
    NUM_QUERY_ROWS,
    NUM_ROWS,
    POSITION,
    SLOT,
    DecodeGraphs,
    DecodeOutput,
    decode_step,
    draft_step,
    stage_step,
)
from engine.gpu.steps.inputs import query_inputs
from engine.gpu.steps.state import DeviceState
from engine.gpu.steps.step import GpuBatch
from engine.start_progress import OnProgress

QueryStep = Callable[[FusedForward, DeviceState, DeviceSampler, Tensor, int], DecodeOutput]


class DecodeSteps:
    """Runs them. What a step returns is a `DecodeOutput`, or hidden states where another stage goes on."""

    def __init__(
        self, forward: FusedForward, state: DeviceState, sampler: DeviceSampler, buckets: Sequence[int],
        num_buffers: int, block_size: int, is_stage: bool, has_drafts: bool, passes_on: bool,
        query_step: QueryStep = draft_step,
    ) -> None:  # fmt: skip
        """buckets: numbers of rows that graphs are captured for, ascending; the last is the most that there are.

        num_buffers: more than steps in flight. is_stage: all steps are given their tokens, as those with drafts are;
        else steps without drafts take what the step before has sampled. passes_on: to another stage, without
        sampling. query_step: of rows with several queries.
        """
        self._block_size, self._buckets, self._num_groups = block_size, buckets, len(state.block_tables)
        self._most_queries = forward.attention.most_queries
        self._rows: DecodeInputs | None = None
        self._queries: DecodeInputs | None = None
        sizes = self._num_groups, buckets[-1], num_buffers, state.last_tokens.device
        if not is_stage:
            self._rows = DecodeInputs(partial(decode_step, forward, state, sampler), NUM_ROWS, *sizes)
        if passes_on:
            step = partial(stage_step, forward, state, is_grouped=has_drafts)
            self._queries = DecodeInputs(step, NUM_QUERY_ROWS, *sizes)
        elif has_drafts:
            self._queries = DecodeInputs(partial(query_step, forward, state, sampler), NUM_QUERY_ROWS, *sizes)
        elif is_stage:
            alone = partial(draft_step, forward, state, sampler, is_grouped=False)
            self._queries = DecodeInputs(alone, NUM_QUERY_ROWS, *sizes)

    def capture(self, on_progress: OnProgress) -> None:
        """Capture the graphs of all buckets."""
        kinds = [each for each in (self._rows, self._queries) if each is not None]
        for number, each in enumerate(kinds):

            def part(stage: str, done: float | None, number: int = number) -> None:
                on_progress(stage, None if done is None else (number + done) / len(kinds))

            each.capture(self._buckets, part)

    def run(self, batch: GpuBatch, num_rows: int, turn: int) -> Any:
        """Run a step in which rows continue behind what they have sampled last: a row each, of so many on the device.

        turn: the buffer, here and below.
        """
        assert self._rows is not None, "stages are given their tokens"
        packed = self._rows.staging[turn].numpy()
        packed[LENGTH, :num_rows] = 0
        starts = [row.start for row in batch.rows]
        packed[POSITION, batch.device_rows] = starts
        packed[LENGTH, batch.device_rows] = [start + 1 for start in starts]
        for group, slots in enumerate(self._rows.slot_fields):
            packed[slots, :num_rows] = -1
            packed[slots, batch.device_rows] = self._slots(batch, group)
        return self._rows.run(num_rows, turn)

    def run_queries(self, batch: GpuBatch, turn: int) -> tuple[Any, int]:
        """Run a step where all tokens before the drafts are known. Returns its output, and the number of queries."""
        assert self._queries is not None, "the settings say that there are drafts"
        queries = query_inputs(batch, self._block_size, self._num_groups, self._most_queries)
        num_queries = queries.shape[1]
        num_rows = self.bucket_of(num_queries)
        packed = self._queries.staging[turn].numpy()
        packed[:, :num_rows] = 0
        packed[self._queries.slot_fields, :num_rows] = -1
        packed[:, :num_queries] = queries
        return self._queries.run(num_rows, turn), num_queries

    def bucket_of(self, num_queries: int) -> int:
        """How many rows a step of so many queries has on the device."""
        return self._buckets[bisect_left(self._buckets, num_queries)]

    def _slots(self, batch: GpuBatch, group: int) -> list[int]:
        size, count = self._block_size, self._num_groups
        return [
            request.block_ids[row.start // size * count + group] * size + row.start % size
            for row, request in zip(batch.rows, batch.requests, strict=True)
        ]


class DecodeInputs:
    """The packed inputs of one kind of step, and its graphs: without them steps run eagerly."""

    def __init__(
        self, step: Callable[[Tensor, int], Any], num_fields: int, num_groups: int, max_rows: int, num_buffers: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """step: of the packed inputs, and the number of rows."""
        self.slot_fields = SLOT, *range(num_fields, num_fields + num_groups - 1)  # of each KV group
        shape, pin = (num_fields + num_groups - 1, max_rows), device.type == "cuda"
        self._packed = torch.zeros(shape, dtype=torch.int32, device=device)
        self.staging = [torch.zeros(shape, dtype=torch.int32, pin_memory=pin) for _ in range(num_buffers)]
        self._step = partial(step, self._packed)
        self._graphs: DecodeGraphs[Any] | None = None

    def capture(self, buckets: Sequence[int], on_progress: OnProgress) -> None:
        self._graphs = DecodeGraphs(self._step, self._packed, self.slot_fields, buckets, on_progress)

    def run(self, num_rows: int, turn: int) -> Any:
        self._packed[:, :num_rows].copy_(self.staging[turn][:, :num_rows], non_blocking=True)
        return self._step(num_rows) if self._graphs is None else self._graphs.replay(num_rows)
