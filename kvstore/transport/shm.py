"""Reads a peer's pool on the same host: its memfd, mapped read-only once, and one copy per run of blocks.

One-sided: the peer does nothing, except that one whose blocks lie in GPU memory copies a lease to rows of the shared
memory when it is asked to. That the blocks are still those of the lease is the digest's proof, afterwards. A mapping
stays readable when its owner dies.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.layout import PoolGeometry
from kvstore.transport.descriptor_server import fetch_pool
from kvstore.transport.lease_client import LeaseClient
from kvstore.transport.pool_info import check_offer, rows_at
from kvstore.transport.runs import merged_runs
from kvstore.transport.shared_memory import blocks_over, map_fd
from kvstore.types import BlockId, Epoch, PeerPool, WorkerId

MAX_MAPPINGS = 64
FETCH_SECONDS = 2.0
Blocks = npt.NDArray[np.uint8]


class ShmTransport:
    """Mappings of peers' pools by (worker, epoch), least recently used first out."""

    name = "shm"

    def __init__(
        self, geometry: PoolGeometry, pool: Blocks, leases: LeaseClient, digest: Callable[[Blocks], list[int]]
    ) -> None:
        """`pool` is what is pulled into; `leases` stays the caller's to close."""
        self._geometry = geometry
        self._pool = pool
        self._leases = leases
        self._digest = digest
        self._lock = threading.Lock()
        self._pools: OrderedDict[tuple[WorkerId, Epoch], Blocks] = OrderedDict()

    @property
    def num_mappings(self) -> int:
        return len(self._pools)

    def offered_by(self, peer: PeerPool) -> bool:
        return bool(peer.shm_socket)

    def open(self, peer: PeerPool) -> None:
        self._mapping(peer)

    def pull(
        self,
        peer: PeerPool,
        positions: Sequence[int],
        local_block_ids: Sequence[BlockId],
        deadline_seconds: float,
    ) -> list[int]:
        pool = self._mapping(peer)
        rows = self._leases.stage(peer, deadline_seconds) if peer.needs_staging else peer.block_ids
        remote_ids = rows_at(rows, positions, len(pool))
        for remote, local, count in merged_runs(list(zip(remote_ids, local_block_ids, strict=True))):
            np.copyto(self._pool[local : local + count], pool[remote : remote + count])
        return [self._digest(self._pool[block_id : block_id + 1])[0] for block_id in local_block_ids]

    def close(self) -> None:
        """Forget all mappings; each ends when its last reader is done."""
        with self._lock:
            self._pools.clear()

    def _mapping(self, peer: PeerPool) -> Blocks:
        key = (peer.worker_id, peer.epoch)
        with self._lock:
            known = self._pools.get(key)
            if known is not None:
                self._pools.move_to_end(key)
                return known
        pool = self._map(peer)  # without the lock: a peer that does not answer shall not hold up the others
        with self._lock:
            for old in [k for k in self._pools if k[0] == peer.worker_id]:
                del self._pools[old]  # an earlier life of the same worker
            self._pools[key] = pool
            if len(self._pools) > MAX_MAPPINGS:
                self._pools.popitem(last=False)
        return pool

    def _map(self, peer: PeerPool) -> Blocks:
        info, fd = fetch_pool(peer.shm_socket, FETCH_SECONDS)
        try:
            check_offer(self._geometry, peer, info)
            geometry = info.geometry
            return blocks_over(map_fd(fd, geometry.pool_bytes, False), geometry.num_blocks, geometry.block_bytes)
        finally:
            os.close(fd)
