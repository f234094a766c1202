"""Copies between a pool in the memory of a CPU and host slots. They have ended when a call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvstore.types import BlockId, HostSlot, merged_runs


class CpuCopies:
    """Between one pool and one buffer of host slots uint8 (num_slots, block_bytes)."""

    def __init__(self, pool: Tensor, host_buffer: Tensor) -> None:
        self._blocks = pool.view(pool.shape[0], -1).view(torch.uint8)
        self._host = host_buffer

    def warm_up(self) -> None:
        """See Copies."""

    def out(self, copies: Sequence[tuple[BlockId, HostSlot]]) -> Callable[[], None]:
        """See Copies."""
        for block_id, slot, count in merged_runs(copies):
            self._host[slot : slot + count].copy_(self._blocks[block_id : block_id + count])
        return lambda: None

    def into(self, copies: Sequence[tuple[HostSlot, BlockId]]) -> Callable[[], None]:
        """See Copies."""
        for slot, block_id, count in merged_runs(copies):
            self._blocks[block_id : block_id + count].copy_(self._host[slot : slot + count])
        return lambda: None
