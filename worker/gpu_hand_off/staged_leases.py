"""Leases on blocks in GPU memory, copied to rows of shared host memory when a reader asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvstore.handle.handle import HandleWriter
from kvstore.pool.leases import Lease
from kvstore.transports.transport import LocalPool
from kvstore.types import BlockId, Epoch, LeaseId
from worker.gpu_hand_off.rank_pool import DeviceRankPool
from worker.kv.kv_leases import KvLeases

logger = logging.getLogger("engine")


class StagedLeases(KvLeases):
    """Readers that map GPU memory need no copies to rows: those on the same host."""

    def __init__(
        self,
        epoch: Epoch,
        ranks: Sequence[LocalPool],
        release: Callable[[Sequence[BlockId]], None],
        handles: HandleWriter,
    ) -> None:
        super().__init__(epoch, ranks, release, handles)
        self._pools = [rank for rank in ranks if isinstance(rank, DeviceRankPool)]
        self._rows = self._pools[0].rows
        self._staged: dict[LeaseId, dict[int, list[BlockId]]] = {}  # rows by the first position

    def stage(self, lease_id: LeaseId, first: int) -> list[BlockId] | None:
        """Copy the lease's blocks from `first` on to rows; None without free rows or without such a lease."""
        block_ids = super().stage(lease_id, first)
        if block_ids is None:
            return None
        staged = self._staged.setdefault(lease_id, {})
        if first not in staged:
            rows = self._rows.take(len(block_ids), len(block_ids))
            if not rows:
                logger.warning("no staging memory for %d KV blocks: raise --kv-staging-gb", len(block_ids))
                return None
            for pool in self._pools:
                pool.copy_out(block_ids, rows)
            staged[first] = rows
        return staged[first]

    def give_up(self, lease: Lease) -> None:
        """Also free the lease's rows."""
        super().give_up(lease)
        for rows in self._staged.pop(lease.lease_id, {}).values():
            self._rows.give_back(rows)
