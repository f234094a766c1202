"""Inputs of steps whose decode rows may have several queries: arrays on the host, and what becomes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.gpu.attention.backend import GpuInputs, GroupInputs
from engine.gpu.steps.decode_steps import LENGTH, POSITION, SLOT
from engine.gpu.steps.rows import DeviceState
from engine.gpu.steps.step import GpuBatch

# Behind those of `DecodeSteps`: token id, the row of its request, and the three of `GpuInputs.query_groups`.
TOKEN, ROW, SPAN, LEADER, COUNT = range(LENGTH + 1, LENGTH + 6)
NUM_FIELDS = COUNT + 1


def query_inputs(batch: GpuBatch, block_size: int, num_groups: int = 1, most_queries: int = 1) -> Any:
    """int32 (7 + num_groups, num_queries): a column per query, in the fields above; then slots of KV groups but the
    first.

    most_queries: of a row that attend as one group.
    """
    token_ids: list[int] = []
    block_ids: list[int] = []
    counts: list[int] = []
    for row, request in zip(batch.rows, batch.requests, strict=True):
        drafts = row.draft_token_ids
        token_ids.append(request.token_ids[row.start])
        token_ids += drafts
        counts.append(1 + len(drafts))
        first, last = row.start // block_size * num_groups, (row.start + len(drafts)) // block_size * num_groups
        if first == last:
            block_ids += request.block_ids[first : first + num_groups] * counts[-1]
            continue
        for position in range(row.start, row.start + counts[-1]):
            first = position // block_size * num_groups
            block_ids += request.block_ids[first : first + num_groups]
    of_row = np.repeat(np.arange(len(counts)), counts)
    num_queries = np.array(counts)[of_row]
    starts = np.array([row.start for row in batch.rows])[of_row]
    index = np.arange(len(of_row)) - (np.cumsum(counts) - counts)[of_row]
    leader = index // most_queries * most_queries
    end = np.minimum(leader + most_queries, num_queries)
    leaders = np.flatnonzero(index == leader)
    queries = np.zeros((NUM_FIELDS + num_groups - 1, len(of_row)), dtype=np.int32)
    slots = np.array(block_ids).reshape(-1, num_groups).T * block_size + (starts + index) % block_size
    queries[POSITION] = starts + index
    queries[SLOT], queries[NUM_FIELDS:] = slots[0], slots[1:]
    queries[LENGTH] = starts + index + 1
    queries[TOKEN] = token_ids
    queries[ROW] = np.array(batch.device_rows)[of_row]
    queries[SPAN] = starts + end
    queries[LEADER, : len(leaders)] = leaders
    queries[COUNT, : len(leaders)] = (end - leader)[leaders]
    return queries


def query_step_inputs(state: DeviceState, queries: Tensor, is_grouped: bool = True) -> GpuInputs:
    """Inputs of decode rows of which each query names its token and the row of its request.

    A query has its request's block table: the K and V of all of them are written before any attends. is_grouped:
    queries of a row attend together; else each is a row of its own.
    """
    rows, slots = queries[ROW].long(), (queries[SLOT], *queries[NUM_FIELDS:])
    groups = [GroupInputs(own, table[rows]) for own, table in zip(slots, state.block_tables, strict=True)]
    token_ids, of_groups = queries[TOKEN].long(), queries[SPAN : COUNT + 1] if is_grouped else None
    return GpuInputs(token_ids, queries[POSITION], queries[LENGTH], groups, query_groups=of_groups)


def are_last_tokens(queries: Tensor, rows: Tensor, sampled: Tensor) -> Tensor:
    """Whether the token sampled after each query is the last one of its request, bool (n,).

    That is the token after the last of the drafts that are right: a draft is, if those before it are and it is what
    was sampled before it. queries: see `query_inputs`; those of a request follow each other. rows: int64 (n,), of
    their requests.
    """
    in_use = queries[LENGTH] > 0
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
    return is_last
