"""The plain attention backend: reads all K and V from the pool, row by row, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cpu.batch import StepBatch
from engine.layers.attention import AttentionBlock
from engine.layers.rotary import Rotation
from kernels.paged_attention import attend_causally, gather_kv, write_kv


@dataclass(slots=True)
class PoolMetadata:
    """Metadata of `PoolAttention`: where each new token is stored, and the blocks of each row."""

    rotation: Rotation
    block_ids: Tensor  # (num_tokens,)
    offsets: Tensor  # (num_tokens,)
    batch: StepBatch
    tables: list[Tensor]  # block ids of each row's sequence


class PoolAttention:
    """Attention over the pool, one sequence after the other. Simple, correct, slow."""

    name = "pool"

    def __init__(self, pool: Tensor, rotary: Tensor) -> None:
        """rotary: see `rotary_table`."""
        self._pool = pool
        self._rotary = rotary

    def plan(self, batch: StepBatch, inputs: Tensor) -> PoolMetadata:
        block_size, device = self._pool.shape[4], self._pool.device
        tables = [
            torch.tensor(request.block_ids[: -(-seq_len // block_size)], device=device)
            for request, seq_len in zip(batch.requests, batch.seq_lens, strict=True)
        ]
        return PoolMetadata(Rotation.of(self._rotary, inputs[1]), inputs[2], inputs[3], batch, tables)

    def attend(self, block: AttentionBlock, qkv: Tensor, metadata: PoolMetadata) -> Tensor:
        q, kv = block.heads(qkv, metadata.rotation)
        write_kv(self._pool, block.layer, kv, metadata.block_ids, metadata.offsets)
        batch, attended = metadata.batch, []
        for row, table in enumerate(metadata.tables):
            cached = gather_kv(self._pool, block.layer, table, batch.seq_lens[row]).to(q.dtype)
            queries = q[batch.query_starts[row] : batch.query_starts[row + 1]]
            attended.append(self._attend_row(batch, row, queries, *block.context(cached)))
        return block.outputs(torch.cat(attended))

    def _attend_row(self, batch: StepBatch, row: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend causally: the queries of a row are the last ones of its sequence."""
        return attend_causally(queries, keys, values)
