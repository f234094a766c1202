"""The seam between models and the paged KV pool: where new K and V go, and what queries attend to.

`AttentionBackend.prepare` turns a step's batch into metadata once; `attend` runs per layer and is given that metadata
as an argument. `PoolAttention` is the plain backend: it reads everything from the pool, row by row, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.cpu.batch import StepBatch
from kernels.paged_attention import attend_sequence, gather_kv, write_kv

AttentionMetadata = Any  # made and read by one backend only; models pass it through


class AttentionBackend(Protocol):
    """Writes K and V of new tokens, and attends."""

    def prepare(self, batch: StepBatch, inputs: Tensor) -> AttentionMetadata:
        """Metadata of one step. inputs: `batch.inputs` on the device, int64 (4, num_tokens)."""
        ...

    def attend(self, layer: int, qkv: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Store K and V, then attend causally.

        qkv: (num_tokens, num_heads + 2 num_kv_heads, head_dim): q, k, v, with q and k already rotated.
        Returns (num_tokens, num_heads * head_dim).
        """
        ...


@dataclass(slots=True)
class PoolMetadata:
    """For `PoolAttention`: where each new token goes, and each row's range of queries and blocks."""

    block_ids: Tensor  # (num_tokens,)
    offsets: Tensor  # (num_tokens,)
    rows: list[tuple[int, int, Tensor, int]]  # first query, end of queries, block table, sequence length


class PoolAttention:
    """Attention straight from the pool, one sequence after the other. Simple, correct, slow."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool

    def prepare(self, batch: StepBatch, inputs: Tensor) -> PoolMetadata:
        block_size = self._pool.shape[4]
        rows = []
        for index, request in enumerate(batch.requests):
            seq_len = batch.seq_lens[index]
            table = torch.tensor(request.block_ids[: -(-seq_len // block_size)], device=self._pool.device)
            rows.append((batch.query_starts[index], batch.query_starts[index + 1], table, seq_len))
        return PoolMetadata(inputs[2], inputs[3], rows)

    def attend(self, layer: int, qkv: Tensor, metadata: PoolMetadata) -> Tensor:
        num_kv_heads = self._pool.shape[3]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        q, kv = qkv[:, :num_heads], qkv[:, num_heads:].view(-1, 2, num_kv_heads, qkv.shape[2])
        write_kv(self._pool, layer, kv, metadata.block_ids, metadata.offsets)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for start, stop, table, seq_len in metadata.rows:
            out[start:stop] = attend_sequence(q[start:stop], gather_kv(self._pool, layer, table, seq_len))
        return out.flatten(1)
