"""KV export: leased blocks that peers may read. Nothing to do on a CPU; digests and pinned staging on a GPU.

A lease holds the references on its blocks, wherever they lie; readers get the blocks' digests with it. Blocks in GPU
memory are copied to rows of shared host memory only when a reader asks for it, which one of the same host's GPUs does
not. Called by `KvLeases`, from the engine's loop only, except `HostRows`, which pulls share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from kvstore.pool.block_pool import BlockPool
from kvstore.pool.digest import digest_rows
from kvstore.pool.leases import Lease
from kvstore.transports.host_pull import Blocks
from kvstore.types import BlockId, LeaseId
from worker.kv.device_pool import DevicePool


class KvExporter(Protocol):
    """The owner's side of leases."""

    def digests(self, block_ids: Sequence[BlockId]) -> list[list[int]]:
        """Digests of complete blocks, for each rank's pool."""

    def stage(self, lease: Lease, first: int) -> list[BlockId] | None:
        """Rows of the shared memory that hold the lease's blocks from position `first` on; None without room."""

    def end_export(self, lease: Lease) -> None:
        """Give up the references and rows of a lease that has ended."""

    def fence(self) -> None:
        """Mark that blocks are about to be given to loads, behind the steps launched so far."""


class DirectExporter:
    """The pools themselves are shared memory. ranks: of each uint8 [num_blocks, block_bytes]."""

    def __init__(
        self, ranks: Sequence[Blocks], pool: BlockPool, end_steps: Callable[[], None] = lambda: None
    ) -> None:
        """end_steps: returns when no step in flight writes to blocks any more."""
        self._ranks = ranks
        self._pool = pool
        self._end_steps = end_steps

    def digests(self, block_ids: Sequence[BlockId]) -> list[list[int]]:
        return [digest_rows(blocks, block_ids) for blocks in self._ranks]

    def stage(self, lease: Lease, first: int) -> list[BlockId] | None:
        return list(lease.block_ids[first:])

    def end_export(self, lease: Lease) -> None:
        self._pool.release(lease.block_ids)

    def fence(self) -> None:
        """Let steps in flight end; but for those of a pipeline they have when the loop gives blocks away."""
        self._end_steps()


class HostRows:
    """Pinned rows of the shared memory in front of a GPU. Safe to use from several threads.

    blocks: uint8 [num_rows, block_bytes]; memory: the same bytes as a tensor.
    """

    def __init__(self, blocks: Blocks, memory: Tensor, beside: HostRows | None = None) -> None:
        """beside: rows of another rank, as many: a row is then free or taken in both."""
        self.blocks = blocks
        self.memory = memory
        self._rows: BlockPool = beside._rows if beside else BlockPool(len(blocks), enable_prefix_cache=False)
        self._lock: threading.Lock = beside._lock if beside else threading.Lock()

    @property
    def num_free(self) -> int:
        return self._rows.num_available

    def take(self, least: int, most: int) -> list[BlockId]:
        """Take up to `most` free rows; none when there are fewer than `least`."""
        with self._lock:
            count = min(self._rows.num_available, most)
            return self._rows.allocate(count) if count >= least else []

    def give_back(self, rows: Sequence[BlockId]) -> None:
        with self._lock:
            self._rows.release(rows)


class DeviceExporter:
    """Pools in GPU memory. ranks: of each its pool and the rows in front of it."""

    def __init__(self, ranks: Sequence[tuple[DevicePool, HostRows]], pool: BlockPool) -> None:
        self._ranks = ranks
        self._rows = ranks[0][1]
        self._pool = pool
        self._staged: dict[LeaseId, dict[int, list[BlockId]]] = {}  # by the first position

    def digests(self, block_ids: Sequence[BlockId]) -> list[list[int]]:
        return [device_pool.digests(block_ids) for device_pool, _ in self._ranks]

    def stage(self, lease: Lease, first: int) -> list[BlockId] | None:
        staged = self._staged.setdefault(lease.lease_id, {})
        if first not in staged:
            block_ids = lease.block_ids[first:]
            rows = self._rows.take(len(block_ids), len(block_ids))
            if not rows:
                return None
            for device_pool, own_rows in self._ranks:
                device_pool.copy_out(block_ids, own_rows.memory, rows)
            staged[first] = rows
        return staged[first]

    def end_export(self, lease: Lease) -> None:
        self._pool.release(lease.block_ids)
        for rows in self._staged.pop(lease.lease_id, {}).values():
            self._rows.give_back(rows)

    def fence(self) -> None:
        (first, _), *others = self._ranks
        first.fence()
        for device_pool, _ in others:
            device_pool.fence(of=first)
