"""Steps of decode rows: inputs packed on the host, one copy to the device, then one graph where there are graphs.

A step that is being filled, and those in flight, have a buffer of pinned memory each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from engine.gpu.forward import FusedForward
from engine.gpu.sampling.device_sampler import DeviceSampler
from engine.gpu.steps.graphs import (
    LENGTH,
    NUM_QUERY_ROWS,
    NUM_ROWS,
    POSITION,
    SLOT,
    DecodeGraphs,
    decode_step,
    draft_step,
    stage_step,
)
from engine.gpu.steps.inputs import query_inputs
from engine.gpu.steps.state import DeviceState
from engine.gpu.steps.step import GpuBatch
from engine.start_progress import OnProgress


class DecodeSteps:
    """Runs them. What a step returns is a `DecodeOutput`, or hidden states where another stage goes on."""

    def __init__(
        self, forward: FusedForward, state: DeviceState, sampler: DeviceSampler, buckets: Sequence[int],
        num_buffers: int, block_size: int, knows_tokens: bool, passes_on: bool,
    ) -> None:  # fmt: skip
        """buckets: numbers of rows that graphs are captured for, ascending; the last is the most that there are.

        num_buffers: more than steps in flight. knows_tokens: steps are given their tokens, with drafts behind them,
        instead of taking what the step before has sampled. passes_on: to another stage, without sampling.
        """
        num_groups = len(state.block_tables)
        num_fields = NUM_QUERY_ROWS if knows_tokens else NUM_ROWS
        self._slot_fields = SLOT, *range(num_fields, num_fields + num_groups - 1)  # of each KV group
        self._block_size, self._buckets = block_size, buckets
        shape, device = (num_fields + num_groups - 1, buckets[-1]), state.last_tokens.device
        self._packed = torch.zeros(shape, dtype=torch.int32, device=device)
        pin = device.type == "cuda"
        self._staging = [torch.zeros(shape, dtype=torch.int32, pin_memory=pin) for _ in range(num_buffers)]
        step = draft_step if knows_tokens else decode_step
        self._step: Callable[[int], Any] = partial(step, forward, state, sampler, self._packed)
        if passes_on:
            self._step = partial(stage_step, forward, state, self._packed)
        self._graphs: DecodeGraphs[Any] | None = None  # without them steps run eagerly

    def capture(self, on_progress: OnProgress) -> None:
        """Capture the graphs of all buckets."""
        self._graphs = DecodeGraphs(self._step, self._packed, self._slot_fields, self._buckets, on_progress)

    def run(self, batch: GpuBatch, num_rows: int, turn: int) -> Any:
        """Run a step in which rows continue behind what they have sampled last: a row each, of so many on the device.

        turn: the buffer, here and below.
        """
        packed = self._staging[turn].numpy()
        packed[LENGTH, :num_rows] = 0
        starts = [row.start for row in batch.rows]
        packed[POSITION, batch.device_rows] = starts
        packed[LENGTH, batch.device_rows] = [start + 1 for start in starts]
        for group, slots in enumerate(self._slot_fields):
            packed[slots, :num_rows] = -1
            packed[slots, batch.device_rows] = self._slots(batch, group)
        return self._run(num_rows, turn)

    def run_queries(self, batch: GpuBatch, turn: int) -> tuple[Any, int]:
        """Run a step where all tokens before the drafts are known. Returns its output, and the number of queries."""
        queries = query_inputs(batch, self._block_size, len(self._slot_fields))
        num_queries = queries.shape[1]
        num_rows = self.bucket_of(num_queries)
        packed = self._staging[turn].numpy()
        packed[:, :num_rows] = 0
        packed[self._slot_fields, :num_rows] = -1
        packed[:, :num_queries] = queries
        return self._run(num_rows, turn), num_queries

    def bucket_of(self, num_queries: int) -> int:
        """How many rows a step of so many queries has on the device."""
        return self._buckets[bisect_left(self._buckets, num_queries)]

    def _run(self, num_rows: int, turn: int) -> Any:
        self._packed[:, :num_rows].copy_(self._staging[turn][:, :num_rows], non_blocking=True)
        return self._step(num_rows) if self._graphs is None else self._graphs.replay(num_rows)

    def _slots(self, batch: GpuBatch, group: int) -> list[int]:
        size, count = self._block_size, len(self._slot_fields)
        return [
            request.block_ids[row.start // size * count + group] * size + row.start % size
            for row, request in zip(batch.rows, batch.requests, strict=True)
        ]
