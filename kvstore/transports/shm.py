"""Reads the pool of a peer on the same host: maps its memfd read-only, once, and copies each run of blocks.

Reads are one-sided: the peer takes no part, except that a peer with blocks in GPU memory first copies them to rows of
the shared memory on request. The digests prove afterwards that the blocks were still the lease's. A mapping stays
readable when its owner dies.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import TransferError
from common.wings import from_wing
from kvstore.handle.handle import PeerShard, PoolInfo, PoolName, rows_at
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.shared_memory import blocks_over, fetch_pool, map_fd
from kvstore.transports.transport import BlockPull, Blocks, LocalPool, Reader, Transport, pull_parts
from kvstore.types import BlockId, Epoch, merged_runs

NAME = "shm"
MAX_MAPPINGS = 64
FETCH_SECONDS = 2.0


def rows_of_lease(
    shard: PeerShard, positions: Sequence[int], num_rows: int, leases: LeaseClient, deadline_seconds: float
) -> list[BlockId]:
    """Return the rows of the peer's host memory, out of `num_rows`, with the lease's blocks at `positions`.

    A peer with blocks in GPU memory copies them there first. Raises TransferError or UnavailableError.
    """
    if not shard.address.needs_staging:
        return rows_at(shard.block_ids, positions, num_rows)
    staged_rows = from_wing("kvstore.transports.staged_rows:staged_rows")
    if staged_rows is None:
        raise TransferError("a peer's KV in GPU memory needs worker.gpu_hand_off, which this installation lacks")
    rows: list[BlockId] = staged_rows(shard, positions, num_rows, leases, deadline_seconds)
    return rows


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Mapped host memory of a peer: its pool, or the staging rows of a pool in GPU memory."""

    info: PoolInfo
    blocks: Blocks  # read-only


class PeerMappings:
    """A thread-safe LRU cache of peers' mapped memory, by worker, rank and epoch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[PoolName, Epoch], PeerMemory] = OrderedDict()

    def clear(self) -> None:
        """Drop all mappings; each is unmapped after its last reader."""
        with self._lock:
            self._found.clear()

    def of(self, shard: PeerShard) -> PeerMemory:
        """Return the memory with the shard or its staged copies. Raises TransferError, UnavailableError."""
        key = (shard.pool_name, shard.epoch)
        with self._lock:
            memory = self._found.get(key)
            if memory is not None:
                self._found.move_to_end(key)
        if memory is None:
            memory = self.map(shard)  # without the lock: a peer that does not answer must not block others
            with self._lock:
                for stale in [k for k in self._found if k[0] == key[0]]:
                    del self._found[stale]  # an earlier epoch of the same pool
                self._found[key] = memory
                if len(self._found) > MAX_MAPPINGS:
                    self._found.popitem(last=False)
        shard.check_offer(memory.info)
        return memory

    def map(self, shard: PeerShard) -> PeerMemory:
        """Map the memory that the peer hands out. Raises TransferError."""
        info, fd = fetch_pool(shard.address_for(NAME), FETCH_SECONDS)
        try:
            shard.check_offer(info)
            geometry = info.geometry
            mapping = map_fd(fd, geometry.pool_bytes, writable=False)
            return PeerMemory(info, blocks_over(mapping, geometry.num_blocks, geometry.block_bytes))
        finally:
            os.close(fd)


class ShmReader:
    """Copies blocks from peers' mapped memory."""

    def __init__(self, pool: Blocks, leases: LeaseClient) -> None:
        """pool: the destination. leases: the caller closes it."""
        self._pool = pool
        self.leases = leases
        self._mappings = PeerMappings()

    def pull(self, pull: BlockPull) -> list[list[int]]:
        return pull_parts(self._read, pull, self._pool)

    def _read(
        self, shard: PeerShard, positions: Sequence[int], blocks: Blocks, rows: Sequence[int], deadline_seconds: float
    ) -> None:
        theirs = self._mappings.of(shard).blocks
        remote_ids = rows_of_lease(shard, positions, len(theirs), self.leases, deadline_seconds)
        for remote, local, count in merged_runs(list(zip(remote_ids, rows, strict=True))):
            np.copyto(blocks[local : local + count], theirs[remote : remote + count])

    def close(self) -> None:
        self._mappings.clear()


class ShmTransport(Transport):
    """Shared memory. An address is the path of the Unix socket that hands out the memory's descriptor."""

    name = NAME

    def reader(self, pool: LocalPool, leases: LeaseClient) -> Reader:
        return pool.through_host(ShmReader(pool.host_blocks, leases))

    def export(self, pool: LocalPool) -> bytes:
        return pool.socket_path.encode()
