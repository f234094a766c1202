"""Decode steps: inputs are packed on the host and sent in one copy, then one CUDA graph runs the step.

The step that is being filled and each step in flight have a pinned buffer of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.gpu.attention.backend import GpuInputs, GroupInputs
from engine.gpu.forward import FusedForward
from engine.gpu.steps.rows import RowTable
from engine.gpu.steps.samples import StepSamples
from engine.gpu.steps.step import GpuBatch, GpuStep, sampled_rows
from engine.wings import OnProgress

logger = logging.getLogger(__name__)
POSITION, SLOT, LENGTH = range(3)  # rows of the packed inputs; the slots of further KV groups follow


class DecodeOutput(NamedTuple):
    """Results of one bucket. token_ids: int64 (rows,), negative for padding. logits: (rows, vocab)."""

    token_ids: Tensor
    logits: Tensor


class DecodeSteps:
    """Steps in which each row continues after the token that it sampled last.

    num_fields: rows of the packed inputs without the slots of further KV groups.
    """

    num_fields = LENGTH + 1

    def __init__(
        self, forward: FusedForward, table: RowTable, samples: StepSamples, num_buffers: int, block_size: int
    ) -> None:
        """num_buffers: pinned buffers, more than steps in flight."""
        self._forward, self._table, self._samples, self._block_size = forward, table, samples, block_size
        self._state = samples.state
        self._num_groups, device = len(self._state.block_tables), self._state.last_tokens.device
        more_slots = range(self.num_fields, self.num_fields + self._num_groups - 1)
        self._slot_fields = SLOT, *more_slots  # of each KV group
        shape, pin = (self.num_fields + len(more_slots), table.buckets[-1]), device.type == "cuda"
        self._packed = torch.zeros(shape, dtype=torch.int32, device=device)
        self._staging = [torch.zeros(shape, dtype=torch.int32, pin_memory=pin) for _ in range(num_buffers)]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}  # by row count; without, steps run eagerly

    def capture(self, on_progress: OnProgress) -> None:
        """Capture a graph for each bucket. Each replay reads and writes the same tensors.

        All share one memory pool. The largest is captured first, so that the smaller ones reuse its memory.
        """
        for field in self._slot_fields:
            self._packed[field] = -1  # nothing is stored
        began, graphs = time.monotonic(), {}
        pool = torch.cuda.graph_pool_handle()
        for num_rows in sorted(self._table.buckets, reverse=True):
            self._compute(num_rows)  # compiles kernels, chooses algorithms
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = self._compute(num_rows)
            graphs[num_rows] = graph, output
            on_progress("capturing decode graphs", len(graphs) / len(self._table.buckets))
        self._graphs = graphs
        logger.info("captured %d decode graphs in %.1f s", len(graphs), time.monotonic() - began)

    def queue(self, batch: GpuBatch, step: GpuStep) -> None:
        """Queue a step."""
        num_rows, packed = self._table.bucket(), self._staging[step.turn].numpy()
        packed[LENGTH, :num_rows] = 0
        starts = [row.start for row in batch.rows]
        packed[POSITION, batch.device_rows] = starts
        packed[LENGTH, batch.device_rows] = [start + 1 for start in starts]
        for group, field in enumerate(self._slot_fields):
            packed[field, :num_rows] = -1
            packed[field, batch.device_rows] = self._slots(batch, group)
        output = self._run(num_rows, step.turn)
        sampled = sampled_rows(batch, range(len(batch.rows)), batch.device_rows)
        self._samples.take(output.token_ids, output.logits, batch, sampled, step)

    def places(self, batch: GpuBatch) -> tuple[Sequence[int], Sequence[int], int]:
        """Return the batch row of each token, the index of each token in the step, and the step's padded size."""
        return range(len(batch.rows)), batch.device_rows, self._table.bucket()

    def _slots(self, batch: GpuBatch, group: int) -> list[int]:
        size, count = self._block_size, self._num_groups
        return [
            request.block_ids[row.start // size * count + group] * size + row.start % size
            for row, request in zip(batch.rows, batch.requests, strict=True)
        ]

    def _run(self, num_rows: int, turn: int) -> Any:
        self._packed[:, :num_rows].copy_(self._staging[turn][:, :num_rows], non_blocking=True)
        if not self._graphs:
            return self._compute(num_rows)
        graph, output = self._graphs[num_rows]
        graph.replay()
        return output

    def _compute(self, num_rows: int) -> Any:
        """Run forward pass, head and sampling for rows 0 .. num_rows - 1: the work that a graph captures."""
        packed, state = self._packed[:, :num_rows], self._state
        lengths, last = packed[LENGTH], state.last_tokens[:num_rows]
        slots = (packed[field] for field in self._slot_fields)
        groups = [GroupInputs(*each) for each in zip(slots, state.block_tables, strict=True)]
        inputs = GpuInputs(last, packed[POSITION], lengths, groups)
        logits = self._forward.logits(self._forward.hidden(inputs))
        sampled = self._samples.on_device.sample(logits, slice(num_rows), lengths, last)
        self._forward.observe(inputs, sampled)
        return DecodeOutput(sampled, logits)
