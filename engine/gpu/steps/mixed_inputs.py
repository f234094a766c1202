"""Inputs of an eager step, in which decode rows and chunks of prompts are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from engine.gpu.attention.backend import GpuAttention, GpuInputs, GroupInputs
from engine.gpu.pinning import upload
from engine.gpu.steps.inputs import step_tokens
from engine.gpu.steps.state import DeviceState
from engine.gpu.steps.step import GpuBatch


def mixed_inputs(
    batch: GpuBatch,
    decodes: Sequence[int],
    chunks: Sequence[int],
    state: DeviceState,
    attention: GpuAttention,
    block_size: int,
) -> tuple[GpuInputs, dict[int, int]]:
    """Inputs of these rows of the batch, decode rows first, and the index of each row's last token in them."""
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
