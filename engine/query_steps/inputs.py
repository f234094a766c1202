"""Inputs of steps whose decode rows may have several queries: the host's arrays, and the device's tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.gpu.attention.backend import GpuInputs, GroupInputs
from engine.gpu.steps.decode_steps import LENGTH, POSITION, SLOT
from engine.gpu.steps.rows import DeviceState
from engine.gpu.steps.step import GpuBatch

# After the fields of `DecodeSteps`: token id, the request's row, and the three of `GpuInputs.query_groups`.
TOKEN, ROW, SPAN, LEADER, COUNT = range(LENGTH + 1, LENGTH + 6)
NUM_FIELDS = COUNT + 1


def query_inputs(batch: GpuBatch, block_size: int, num_groups: int = 1, most_queries: int = 1) -> Any:
    """Return int32 (7 + num_groups, num_queries): for each query the fields above, then the slots of the KV groups
    after the first.

    most_queries: most queries of a row that attend as one group.
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
    """Unpack the inputs of decode rows in which each query names its token and its request's row.

    A query has its request's block table; all K and V are written before any query attends. is_grouped: a row's
    queries attend together; otherwise each attends as a row.
    """
    rows, slots = queries[ROW].long(), (queries[SLOT], *queries[NUM_FIELDS:])
    groups = [GroupInputs(own, table[rows]) for own, table in zip(slots, state.block_tables, strict=True)]
    token_ids, of_groups = queries[TOKEN].long(), queries[SPAN : COUNT + 1] if is_grouped else None
    return GpuInputs(token_ids, queries[POSITION], queries[LENGTH], groups, query_groups=of_groups)


def are_last_tokens(queries: Tensor, rows: Tensor, sampled: Tensor) -> Tensor:
    """Return whether the token sampled after each query is the last one of its request, bool (n,).

    That is the token after the last right draft. A draft is right if it equals the token sampled before it and all
    earlier drafts are right. queries: see `query_inputs`; a request's queries are contiguous. rows: int64 (n,), of
    the requests.
    """
    in_use = queries[LENGTH] > 0
    is_draft = torch.zeros_like(in_use)
    is_draft[1:] = (rows[1:] == rows[:-1]) & in_use[1:]
    is_wrong = torch.zeros_like(in_use)
    is_wrong[1:] = is_draft[1:] & (queries[TOKEN][1:] != sampled[:-1])
    num_wrong = is_wrong.cumsum(0)
    index = torch.arange(rows.shape[0], device=rows.device)
    first = torch.where(is_draft, 0, index).cummax(0).values
    is_right = num_wrong == num_wrong[first]  # also true of the request's last token, which is no draft
    is_last = is_right & in_use
    is_last[:-1] &= ~(is_draft[1:] & is_right[1:])
    return is_last
