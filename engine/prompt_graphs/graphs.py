"""Steps with short prompts as CUDA graphs, since launching their kernels one by one takes longer than they run.

Every row of such a step, decode rows too, is a row of the paged prefill kernel, whose work is a list of tiles. A
graph has a fixed number of tokens, tiles and samples; unused ones are padding that stores nothing. See
docs/decisions/kernel-launches-and-cuda-graphs.md.
"""

from __future__ import annotations

import logging
import time
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine.gpu.attention.backend import GpuInputs, GroupInputs
from engine.gpu.forward import FusedForward
from engine.gpu.steps.device_sampler import DeviceSampler
from engine.gpu.steps.inputs import step_tokens
from engine.gpu.steps.rows import MAX_GRAPH_TOKENS, DeviceState
from engine.gpu.steps.samples import StepSamples
from engine.gpu.steps.step import GpuBatch, GpuStep, mark, sampled_rows
from engine.prompt_graphs.inputs import INDEX, LENGTH, POSITION, ROW, SLOT, SOURCE, TOKEN, PromptInputs
from engine.prompt_graphs.shapes import prompt_shapes
from engine.ranks import RankContext
from engine.runner import reads_hidden
from kernels.gpu.attention.prompt_tiles import SMALL_TILE, prefill_tiles
from kernels.gpu.prompt_graphs.merge_splits import PrefillSplits, split_workspace
from kernels.gpu.prompt_graphs.split_tiles import num_spare_tiles, split_tiles

logger = logging.getLogger(__name__)
# Most keys of a row, or with split tiles of a program; for more, the backend of eager steps is faster.
MAX_KEYS, MAX_SPLIT_KEYS = 8192, 16384


def prompt_step(
    forward: FusedForward, state: DeviceState, sampler: DeviceSampler, attended: Tensor,
    workspace: tuple[Tensor, ...], inputs: PromptInputs,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run one step. Returns its sampled tokens int64 (num_rows,), negative if there is none, and their logits.

    A stage that passes hidden states on returns those of all tokens, and an empty tensor.
    attended: (MAX_GRAPH_TOKENS, num_heads * head_dim), finite, for padding. workspace: from `split_workspace`, or
    empty.
    """
    source = inputs.fields[SOURCE].long()
    known = inputs.fields[TOKEN].long()
    token_ids = torch.where(source >= 0, state.last_tokens[source.clamp(min=0)], known)
    none = inputs.fields[POSITION, :0]
    slots = inputs.fields[SLOT], *inputs.fields[SOURCE + 1 :]
    splits = PrefillSplits(inputs.merges, *workspace) if workspace else None
    groups = [
        GroupInputs(own, table[:0], forward.attention.graph_plan(table, inputs.tiles, splits))
        for own, table in zip(slots, state.block_tables, strict=True)
    ]
    attended = attended[: token_ids.shape[0]]
    index, rows = inputs.samples[INDEX].long(), inputs.samples[ROW].long()
    wanted = None if forward.passes_on or index.shape[0] >= token_ids.shape[0] else index
    step = GpuInputs(token_ids, inputs.fields[POSITION], none, groups, attended, wanted)
    hidden = forward.hidden(step)
    if forward.passes_on:
        return hidden, hidden[:0]
    logits = forward.logits(hidden[index] if wanted is None else hidden)
    sampled = sampler.sample(logits, rows.clamp(max=sampler.max_rows - 1), inputs.samples[LENGTH])
    state.last_tokens[rows] = sampled.clamp(min=0)
    forward.observe(step, sampled, index, inputs.samples[LENGTH])
    return sampled, logits


class PromptGraphs:
    """A graph for each number of tokens and rows. captures: False runs the same steps eagerly, for tests."""

    def __init__(
        self,
        forward: FusedForward,
        state: DeviceState,
        samples: StepSamples,
        ranks: RankContext[Any],
        block_size: int,
        group: int,
        num_buffers: int,
        max_tokens: int,
        captures: bool = True,
    ) -> None:
        """group: query heads per KV head. num_buffers: of staging, more than steps in flight."""
        device, sampler = state.last_tokens.device, samples.on_device
        self._samples, self._ranks, self._block_size = samples, ranks, block_size
        attended = torch.zeros(MAX_GRAPH_TOKENS, forward.attention.width, dtype=forward.dtype, device=device)
        self._num_spare = 0
        workspace: tuple[Tensor, ...] = ()
        if forward.attention.split_shape is not None:
            num_kv_heads, head_dim = forward.attention.split_shape
            self._num_spare = num_spare_tiles(num_kv_heads, device)
            workspace = split_workspace(self._num_spare, num_kv_heads, SMALL_TILE, head_dim, device)
        self._parts = forward, state, sampler, attended, workspace
        self._group = group
        self._num_groups = len(state.block_tables)
        self._tokens_per_tile = max(SMALL_TILE // group, 1)
        self.shapes = prompt_shapes(sampler.max_rows, max_tokens)
        size = max((PromptInputs.size(*self._sizes(*shape)) for shape in self.shapes), default=0)
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = [
            torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(num_buffers)
        ]
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}
        if captures:
            self._capture()

    def takes(self, batch: GpuBatch) -> bool:
        """Whether there is a graph for the step, and no row needs the hidden states of its tokens."""
        pairs = zip(batch.rows, batch.requests, strict=True)
        if self._shape_of(batch) is None or any(reads_hidden(row, request) for row, request in pairs):
            return False
        if not self._num_spare:
            return all(row.stop <= MAX_KEYS for row in batch.rows)
        num_keys = sum(-(-row.num_tokens // self._tokens_per_tile) * row.stop for row in batch.rows)
        return num_keys <= self._num_spare * MAX_SPLIT_KEYS

    @staticmethod
    def order(batch: GpuBatch) -> list[int]:
        """Return the order of rows in a graph: first decode rows whose token only the device knows."""
        return sorted(range(len(batch.rows)), key=lambda i: batch.rows[i].stop <= len(batch.requests[i].token_ids))

    def shape_of(self, batch: GpuBatch) -> tuple[int, int]:
        """Return the padded numbers of tokens and samples of the step's graph."""
        shape = self._shape_of(batch)
        assert shape is not None, "takes() was asked"
        return shape

    def _shape_of(self, batch: GpuBatch) -> tuple[int, int] | None:
        """Return the smallest shape that holds the step."""
        num_tokens, num_rows = sum(row.num_tokens for row in batch.rows), len(batch.rows)
        return next((shape for shape in self.shapes if num_tokens <= shape[0] and num_rows <= shape[1]), None)

    def queue(self, batch: GpuBatch, step: GpuStep) -> None:
        """Queue a step."""
        token_ids, logits, sampling = self.run(batch, step.turn)
        step.takes_drafts = not self._parts[0].is_observed
        if self._ranks.passes_on:
            self._ranks.pass_on(token_ids[: sum(row.num_tokens for row in batch.rows)])
            return
        self._samples.take(token_ids, logits, batch, sampled_rows(batch, sampling), step)
        if not sampling:
            step.waits.append(mark(self._buffer.device))

    def run(self, batch: GpuBatch, turn: int) -> tuple[Tensor, Tensor, list[int]]:
        """Run the step. Returns `prompt_step`'s result, and the batch's row of each sampled token."""
        shape = self.shape_of(batch)
        sampling = self._fill(self._inputs(self._staging[turn], *shape), batch)
        used = PromptInputs.size(*self._sizes(*shape))
        self._buffer[:used].copy_(self._staging[turn][:used], non_blocking=True)
        if shape in self._graphs:
            graph, output = self._graphs[shape]
            graph.replay()
        else:
            output = prompt_step(*self._parts, self._inputs(self._buffer, *shape))
        return *output, sampling

    def _fill(self, host: PromptInputs, batch: GpuBatch) -> list[int]:
        """Write the inputs of a step. Returns the rows that sample."""
        fields, tiles, merges, samples = (
            part.numpy() for part in (host.fields, host.tiles, host.merges, host.samples)
        )  # fmt: skip
        fields[:] = 0
        fields[SLOT:] = -1
        tiles[:] = 0
        samples[:] = 0
        samples[ROW] = self._parts[2].max_rows
        pairs = [(batch.rows[i], batch.requests[i], batch.device_rows[i], i) for i in self.order(batch)]
        starts = list(accumulate((row.num_tokens for row, *_ in pairs), initial=0))
        num_unknown = sum(row.stop > len(request.token_ids) for row, request, *_ in pairs)
        work = [(row, request) for row, request, *_ in pairs]
        own = step_tokens(work[:num_unknown], work[num_unknown:], self._block_size, self._num_groups)[:, : starts[-1]]
        fields[: SLOT + 1, : starts[-1]] = own[: SLOT + 1]
        fields[SOURCE + 1 :, : starts[-1]] = own[SLOT + 1 :]
        fields[SOURCE, :num_unknown] = [device_row for _, _, device_row, _ in pairs[:num_unknown]]
        sampling: list[int] = []
        for (row, _, device_row, i), stop in zip(pairs, starts[1:], strict=True):
            if row.samples:
                samples[:, len(sampling)] = stop - 1, device_row, row.stop
                sampling.append(i)
        found: list[Any] = prefill_tiles(starts, [row.stop for row, *_ in pairs], self._group, SMALL_TILE)
        if self._num_spare:
            merges[:] = 0
            found, split = split_tiles(found, self._num_spare)
            if split:
                merges[: len(split)] = split
        tiles[: len(found)] = [(pairs[row][2], *rest) for row, *rest in found]
        return sampling

    def _sizes(self, num_tokens: int, num_rows: int) -> tuple[int, int, int, int, int]:
        num_tiles = -(-num_tokens // self._tokens_per_tile) + min(num_rows, num_tokens)
        return num_tokens, num_tiles, num_rows, self._num_groups, self._num_spare

    def _inputs(self, buffer: Tensor, num_tokens: int, num_rows: int) -> PromptInputs:
        return PromptInputs.over(buffer, *self._sizes(num_tokens, num_rows))

    def _capture(self) -> None:
        began = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        self._buffer.zero_()  # no tiles and no samples; slots are set below
        for shape in reversed(self.shapes):
            inputs = self._inputs(self._buffer, *shape)
            inputs.fields[SLOT:] = -1
            inputs.samples[ROW] = self._parts[2].max_rows
            prompt_step(*self._parts, inputs)  # compiles kernels and chooses algorithms
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = prompt_step(*self._parts, inputs)
            self._graphs[shape] = graph, output
            self._buffer.zero_()
        logger.info("captured %d prompt graphs in %.1f s", len(self._graphs), time.monotonic() - began)
