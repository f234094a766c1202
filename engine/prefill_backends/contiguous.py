"""K and V of a step's prompts as contiguous memory, for kernels that know no block tables.

When no row has cached context, they are in the step's own q/k/v GEMM output. Else all rows are gathered from the pool
into a buffer that the layers share: the copy is small beside the attention of a chunk (2% at 8k queries, 7% at 512).
A pool of 8 bits is always gathered, so that a prompt's result does not depend on how much of it was cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.gpu.pinning import upload
from kernels.gpu.prefill_backends.gather_kv import gather_kv, gather_tiles

MAX_GATHER_BYTES = 512 << 20  # of K and V of one layer; with more context than that, the paged kernel is used


@dataclass(frozen=True, slots=True)
class KeysPlan:
    """starts: each row's first key, and the number of keys at the end. tiles: None to read the GEMM output."""

    starts: list[int]
    block_tables: Tensor
    tiles: Tensor | None


def plan_keys(query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor, gathers: bool) -> KeysPlan:
    """See PrefillAttention.plan. gathers: whether keys come from the pool; without it no row has cached context."""
    starts = list(accumulate(seq_lens, initial=0))
    if not gathers:
        assert starts == list(query_starts)
        return KeysPlan(starts, block_tables, None)
    tiles = upload(gather_tiles(seq_lens), torch.int32, block_tables.device).view(-1, 4)
    return KeysPlan(starts, block_tables, tiles)


class KeyBuffer:
    """Holds the gathered K and V of one layer at a time. Taken at once, so that it counts when memory is measured."""

    def __init__(self, pool: Tensor, dtype: torch.dtype, max_bytes: int = MAX_GATHER_BYTES) -> None:
        num_kv_heads, _, head_dim = pool.shape[3:]
        self._max_keys = max_bytes // (2 * num_kv_heads * head_dim * dtype.itemsize)
        size = self._max_keys * 2 * num_kv_heads * head_dim
        self._memory = torch.empty(size, dtype=dtype, device=pool.device)

    def fits(self, num_keys: int) -> bool:
        return num_keys <= self._max_keys

    def gathered(self, pool: Tensor, layer: int, plan: KeysPlan) -> Tensor:
        """K and V of all rows of a plan with tiles: (2, num_keys, num_kv_heads, head_dim), the last contiguous."""
        assert plan.tiles is not None
        num_kv_heads, _, head_dim = pool.shape[3:]
        num_keys = plan.starts[-1]
        kv = self._memory[: 2 * num_kv_heads * num_keys * head_dim].view(2, num_kv_heads, num_keys, head_dim)
        return gather_kv(pool, layer, plan.block_tables, plan.tiles, kv).transpose(1, 2)
