"""The plain attention backend: it reads everything from the pool, row by row, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.cpu.batch import StepBatch, is_generated
from engine.layers.attention import AttentionBlock
from engine.layers.rotary import Rotation
from kernels.paged_attention import aligned_attention, attend_causally, gather_kv, write_kv


class PoolRow(NamedTuple):
    start: int  # of the row's queries
    stop: int
    table: Tensor  # block ids
    seq_len: int
    is_generated: bool


@dataclass(slots=True)
class PoolMetadata:
    """For `PoolAttention`: where each new token goes, and each row's range of queries and blocks."""

    rotation: Rotation
    block_ids: Tensor  # (num_tokens,)
    offsets: Tensor  # (num_tokens,)
    rows: list[PoolRow]


class PoolAttention:
    """Attention straight from the pool, one sequence after the other. Simple, correct, slow."""

    name = "pool"

    def __init__(self, pool: Tensor, rotary: Tensor) -> None:
        """rotary: see `rotary_table`."""
        self._pool = pool
        self._rotary = rotary

    def plan(self, batch: StepBatch, inputs: Tensor) -> PoolMetadata:
        block_size = self._pool.shape[4]
        rows = []
        for index, request in enumerate(batch.requests):
            seq_len = batch.seq_lens[index]
            table = torch.tensor(request.block_ids[: -(-seq_len // block_size)], device=self._pool.device)
            start, stop = batch.query_starts[index : index + 2]
            rows.append(PoolRow(start, stop, table, seq_len, is_generated(batch.rows[index], request)))
        return PoolMetadata(Rotation.of(self._rotary, inputs[1]), inputs[2], inputs[3], rows)

    def attend(self, block: AttentionBlock, qkv: Tensor, metadata: PoolMetadata) -> Tensor:
        q, kv = block.heads(qkv, metadata.rotation)
        write_kv(self._pool, block.layer, kv, metadata.block_ids, metadata.offsets)
        attended = []
        for row in metadata.rows:
            keys, values = block.context(gather_kv(self._pool, block.layer, row.table, row.seq_len).to(q.dtype))
            queries = q[row.start : row.stop]
            if row.is_generated:
                attended.append(attend_one_by_one(queries, keys, values))
            else:
                attended.append(aligned_attention(queries, keys, values))
        return block.outputs(torch.cat(attended))


def attend_one_by_one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of a sequence's last queries, each by itself: drafts that are verified change no bits.

    A product of several rows may add up in another order than one of a single row.
    """
    num_keys, num_later = keys.shape[1], range(queries.shape[0] - 1, -1, -1)
    seen = [num_keys - later for later in num_later]
    by_query = zip(torch.split(queries, 1), seen, strict=True)
    return torch.cat([attend_causally(query, keys[:, :count], values[:, :count]) for query, count in by_query])
