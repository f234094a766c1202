"""Whole decode steps as CUDA graphs: forward pass, logits, sampled token. One graph per bucket.

A graph reads fixed tensors: packed inputs, block tables and last tokens. All graphs share one memory pool and are
captured largest first, so that the smaller ones fit into what the largest took.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engine.gpu.attention.backend import GpuInputs, GroupInputs
from engine.gpu.forward import FusedForward
from engine.gpu.sampling.device_sampler import DeviceSampler
from engine.gpu.steps.state import DeviceState
from engine.start_progress import OnProgress

logger = logging.getLogger(__name__)
# Rows of the packed inputs, from TOKEN on for drafts and stages alone; then come the slots of further KV groups.
POSITION, SLOT, LENGTH, TOKEN, ROW, SPAN, LEADER, COUNT = range(8)
NUM_ROWS, NUM_QUERY_ROWS = LENGTH + 1, COUNT + 1
Output = TypeVar("Output")


@dataclass(slots=True)
class DecodeOutput:
    """Results of one bucket. token_ids: int64 (rows,), negative where there is none. logits: (rows, vocab)."""

    token_ids: Tensor
    logits: Tensor


def decode_step(
    forward: FusedForward, state: DeviceState, sampler: DeviceSampler, packed: Tensor, num_rows: int
) -> DecodeOutput:
    """One decode step of rows 0 .. num_rows - 1.

    packed: int32 (3, max_rows): positions, slots, lengths; then slots of KV groups but the first.
    """
    lengths = packed[LENGTH, :num_rows]
    last = state.last_tokens[:num_rows]
    slots = packed[SLOT, :num_rows], *packed[NUM_ROWS:, :num_rows]
    groups = [GroupInputs(*each) for each in zip(slots, state.block_tables, strict=True)]
    inputs = GpuInputs(last, packed[POSITION, :num_rows], lengths, groups)
    logits = forward.logits(forward.hidden(inputs))
    sampled = sampler.sample(logits, slice(num_rows), lengths, last)
    forward.observe(inputs, sampled)
    return DecodeOutput(sampled, logits)


def draft_step(
    forward: FusedForward, state: DeviceState, sampler: DeviceSampler, packed: Tensor, num_queries: int,
    is_grouped: bool = True,
) -> DecodeOutput:  # fmt: skip
    """A decode step whose rows may have several queries: the last token of a request, then its drafts.

    A query has a row's inputs, and its request's block table: the K and V of all of them are written before any
    attends. packed: int32 (8, max_rows), a column per query: position, slot, length, token id, the row of its
    request, and the three of `GpuInputs.query_groups`; then slots of KV groups but the first. The next step may
    continue without knowing what is sampled.

    is_grouped: queries of a row attend together; else each is a row of its own.
    """
    queries = packed[:, :num_queries]
    inputs = query_step_inputs(state, queries, is_grouped)
    logits = forward.logits(forward.hidden(inputs))
    sampled = sampler.sample(logits, queries[ROW].long(), queries[LENGTH])
    forward.observe(inputs, sampled)
    nobody = state.last_tokens.shape[0] - 1
    state.last_tokens[rows_of_last_tokens(queries, sampled, nobody)] = sampled.clamp(min=0)
    return DecodeOutput(sampled, logits)


def rows_of_last_tokens(queries: Tensor, sampled: Tensor, nobody: int) -> Tensor:
    """The row of a query's request where its sampled token is the request's last one, int64 (n,); else `nobody`.

    That is the token behind the last of the drafts that are right: a draft is, if those before it are and it is what
    was sampled before it. queries: see `draft_step`; those of a request follow each other.
    """
    rows, in_use = queries[ROW].long(), queries[LENGTH] > 0
    is_draft = torch.zeros_like(in_use)
    is_draft[1:] = (rows[1:] == rows[:-1]) & in_use[1:]
    is_wrong = torch.zeros_like(in_use)
    is_wrong[1:] = is_draft[1:] & (queries[TOKEN][1:] != sampled[:-1])
    num_wrong = is_wrong.cumsum(0)
    index = torch.arange(rows.shape[0], device=rows.device)
    first = torch.where(is_draft, 0, index).cummax(0).values
    is_right = num_wrong == num_wrong[first]  # also of the request's own last token, which is no draft
    is_last = is_right & in_use
    is_last[:-1] &= ~(is_draft[1:] & is_right[1:])
    return torch.where(is_last, rows, nobody)


def query_step_inputs(state: DeviceState, queries: Tensor, is_grouped: bool = True) -> GpuInputs:
    """Inputs of decode rows of which each query names its token and the row of its request."""
    rows, slots = queries[ROW].long(), (queries[SLOT], *queries[NUM_QUERY_ROWS:])
    groups = [GroupInputs(own, table[rows]) for own, table in zip(slots, state.block_tables, strict=True)]
    token_ids, of_groups = queries[TOKEN].long(), queries[SPAN : COUNT + 1] if is_grouped else None
    return GpuInputs(token_ids, queries[POSITION], queries[LENGTH], groups, query_groups=of_groups)


def stage_step(
    forward: FusedForward, state: DeviceState, packed: Tensor, num_queries: int, is_grouped: bool = True
) -> Tensor:
    """A step as `draft_step`, of a stage that passes hidden states on: (num_queries, hidden)."""
    return forward.hidden(query_step_inputs(state, packed[:, :num_queries], is_grouped))


class DecodeGraphs(Generic[Output]):
    """Captured on first construction; `replay` runs a bucket."""

    def __init__(
        self, run: Callable[[int], Output], packed: Tensor, slot_rows: Sequence[int], buckets: Sequence[int],
        on_progress: OnProgress,
    ) -> None:  # fmt: skip
        """run: one of the steps above, for a number of rows. packed: its inputs, whose slots are in `slot_rows`."""
        began = time.monotonic()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Output]] = {}
        pool = torch.cuda.graph_pool_handle()
        for row in slot_rows:
            packed[row] = -1  # nothing is stored while capturing
        for num_rows in sorted(buckets, reverse=True):
            run(num_rows)  # compiles kernels, chooses algorithms
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = run(num_rows)
            self._graphs[num_rows] = (graph, output)
            on_progress("capturing decode graphs", len(self._graphs) / len(buckets))
        logger.info("captured %d decode graphs in %.1f s", len(self._graphs), time.monotonic() - began)

    def replay(self, num_rows: int) -> Output:
        graph, output = self._graphs[num_rows]
        graph.replay()
        return output
