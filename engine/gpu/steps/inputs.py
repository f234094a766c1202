"""The inputs of a step: arrays on the host and, for eager steps, tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from engine.gpu.attention.backend import GpuAttention, GpuInputs, GroupInputs
from engine.gpu.pinning import upload
from engine.gpu.steps.rows import DeviceState
from engine.gpu.steps.step import GpuBatch
from engine.plan import ScheduledRow
from engine.request_states import RequestState

TOKEN, POSITION, SLOT = range(3)  # rows of the result of `step_tokens`; the slots of further KV groups follow


Rows = Sequence[tuple[ScheduledRow, RequestState]]


def step_tokens(decodes: Rows, chunks: Rows, block_size: int, num_groups: int = 1) -> Any:
    """Return token ids, positions and slots, of decode rows and then of prompt chunks.

    The result is int32 (2 + num_groups, num_tokens), since each KV group has slots of its own. The id of a token that
    is not sampled yet is 0. Up to three columns of padding make rows a multiple of 16 bytes: kernels are compiled
    again for pointers that are not aligned.
    """
    num_tokens = len(decodes) + sum(row.num_tokens for row, _ in chunks)
    fields = np.zeros((2 + num_groups, -(-num_tokens // 4) * 4), dtype=np.int32)
    for index, (row, request) in enumerate(decodes):
        fields[TOKEN, index] = request.token_ids[row.start] if row.start < len(request.token_ids) else 0
        fields[POSITION, index] = row.start
        for group in range(num_groups):
            block_id = request.block_ids[row.start // block_size * num_groups + group]
            fields[SLOT + group, index] = block_id * block_size + row.start % block_size
    first = len(decodes)
    for row, request in chunks:
        own = slice(first, first + row.num_tokens)
        positions = np.arange(row.start, row.stop, dtype=np.int32)
        blocks = np.array(request.block_ids[: -(-row.stop // block_size) * num_groups], dtype=np.int32)
        fields[TOKEN, own] = request.token_ids[row.start : row.stop]
        fields[POSITION, own] = positions
        by_group = blocks.reshape(-1, num_groups).T
        fields[SLOT:, own] = by_group[:, positions // block_size] * block_size + positions % block_size
        first = own.stop
    return fields


def mixed_inputs(
    batch: GpuBatch,
    decodes: Sequence[int],
    chunks: Sequence[int],
    state: DeviceState,
    attention: GpuAttention,
    block_size: int,
) -> tuple[GpuInputs, dict[int, int]]:
    """Return the inputs of an eager step, decode rows first, and the index of the last token of each batch row."""
    device = state.last_tokens.device
    pairs = list(zip(batch.rows, batch.requests, strict=True))
    decode_rows, chunk_rows = [pairs[i] for i in decodes], [pairs[i] for i in chunks]
    query_starts = list(accumulate((row.num_tokens for row, _ in chunk_rows), initial=0))
    num_tokens = len(decodes) + query_starts[-1]
    fields = upload(step_tokens(decode_rows, chunk_rows, block_size, len(state.block_tables)), torch.int32, device)
    token_ids, positions, *slots = fields[:, :num_tokens]
    last_of = {i: index for index, i in enumerate(decodes)}
    last_of |= {i: len(decodes) + stop - 1 for i, stop in zip(chunks, query_starts[1:], strict=True)}
    seq_lens = [row.stop for row, _ in chunk_rows]
    index = upload([batch.device_rows[i] for i in (*decodes, *chunks)], torch.int64, device)
    of_decodes, of_chunks = index[: len(decodes)], index[len(decodes) :]
    ids = token_ids.long()
    pending = [k for k, (row, request) in enumerate(decode_rows) if row.start >= len(request.token_ids)]
    if pending:  # the step before samples them
        indices = upload(pending, torch.int64, device)
        ids[indices] = state.last_tokens[of_decodes[indices]]
    decode_tables = [table[of_decodes] for table in state.block_tables]
    plans = attention.plan(query_starts, seq_lens, [table[of_chunks] for table in state.block_tables])
    groups = [GroupInputs(*each) for each in zip(slots, decode_tables, plans, strict=True)]
    return GpuInputs(ids, positions, positions[: len(decodes)] + 1, groups), last_of
