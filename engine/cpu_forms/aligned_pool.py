"""Attention straight from the pool whose bits depend neither on the batch nor on how a prompt is cut."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cpu.batch import StepBatch
from engine.cpu.pool_attention import PoolAttention
from engine.cpu_forms.rows import is_generated
from engine.loader.load import LoadedModel
from kernels.aligned_attention import aligned_attention
from kernels.paged_attention import attend_causally
from kvstore.layout import PoolGeometry


class AlignedPoolAttention(PoolAttention):
    """See `kernels/aligned_attention.py`."""

    def _attend_row(self, batch: StepBatch, row: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if is_generated(batch.rows[row], batch.requests[row]):
            return attend_one_by_one(queries, keys, values)
        return aligned_attention(queries, keys, values)


def attend_one_by_one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of a sequence's last queries, each by itself: drafts that are verified change no bits.

    A product of several rows may add up in another order than one of a single row.
    """
    num_keys, num_later = keys.shape[1], range(queries.shape[0] - 1, -1, -1)
    seen = [num_keys - later for later in num_later]
    by_query = zip(torch.split(queries, 1), seen, strict=True)
    return torch.cat([attend_causally(query, keys[:, :count], values[:, :count]) for query, count in by_query])


def attention_for(loaded: LoadedModel, kv_pool: Tensor, geometry: PoolGeometry) -> AlignedPoolAttention:
    """The backend of any other model."""
    return AlignedPoolAttention(kv_pool, loaded.model.rotary)
