"""The plain attention backend: it reads everything from the pool, row by row, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.cpu.batch import StepBatch
from engine.layers.attention import AttentionBackend, AttentionBlock
from engine.layers.rotary import Rotation
from kernels.paged_attention import attend_causally, gather_kv, write_kv


class BatchAttention(AttentionBackend, Protocol):
    """A backend that plans a `StepBatch`."""

    def plan(self, batch: StepBatch, inputs: Tensor) -> Any:
        """Metadata of one step. inputs: `batch.inputs` on the device, int64 (4, num_tokens)."""
        ...


@dataclass(slots=True)
class PoolMetadata:
    """For `PoolAttention`: where each new token goes, and each row's range of queries and blocks."""

    rotation: Rotation
    block_ids: Tensor  # (num_tokens,)
    offsets: Tensor  # (num_tokens,)
    rows: list[tuple[int, int, Tensor, int]]  # first query, end of queries, block table, sequence length


class PoolAttention:
    """Attention straight from the pool, one sequence after the other. Simple, correct, slow."""

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
            rows.append((batch.query_starts[index], batch.query_starts[index + 1], table, seq_len))
        return PoolMetadata(Rotation.of(self._rotary, inputs[1]), inputs[2], inputs[3], rows)

    def attend(self, block: AttentionBlock, qkv: Tensor, metadata: PoolMetadata) -> Tensor:
        """See AttentionBackend."""
        q, kv = block.heads(qkv, metadata.rotation)
        write_kv(self._pool, block.layer, kv, metadata.block_ids, metadata.offsets)
        attended = []
        for start, stop, table, seq_len in metadata.rows:
            keys, values = block.context(gather_kv(self._pool, block.layer, table, seq_len))
            attended.append(attend_causally(q[start:stop], keys, values))
        return block.outputs(torch.cat(attended))
