"""Reads a peer's pool in GPU memory of the same host, mapped once, with one kernel per pull.

One-sided: the peer does nothing, and its blocks are copied to local blocks without passing through the host. The
reader's device computes the digests of what it copied, which prove that the blocks are still those of the lease.

A mapping stays readable when its owner dies, but would keep the memory from the owner's successor. So the owner holds
a connection to every reader, and a mapping ends with the connection. The `MappingPool` maps and copies memory; this
module knows no CUDA.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import TransferError
from kvstore.handle.handle import PeerShard, PoolInfo, PoolName, rows_at
from kvstore.layout import HeadCopy
from kvstore.transports.cuda_ipc.held_server import fetch_held
from kvstore.transports.transport import BlockPull, SourcePart
from kvstore.types import BlockId

logger = logging.getLogger(__name__)
NAME = "cuda_ipc"
FETCH_SECONDS = 2.0


class RemotePool(Protocol):
    """A peer's pool, mapped on a device."""

    def close(self) -> None:
        """Unmap it. Nothing on the device may use it any more."""
        ...


class MappingPool(Protocol):
    """A local pool in device memory that can map other processes' pools there."""

    def attach(self, fd: int, num_blocks: int, block_bytes: int) -> RemotePool:
        """Map a peer's pool; the caller closes the descriptor. Raises TransferError if it cannot be reached."""
        ...

    def pull(
        self, remote: RemotePool, remote_ids: Sequence[BlockId], local_ids: Sequence[BlockId],
        copy: HeadCopy | None = None,
    ) -> list[int]:  # fmt: skip
        """Copy blocks, or with `copy` some heads of each; wait, and return digests of the whole blocks.

        Raises TransferError.
        """
        ...


@dataclass(slots=True)
class _Mapping:
    """The mapping of one epoch of a peer's pool. `remote` is None after its end; readers hold `lock`."""

    name: PoolName
    info: PoolInfo
    remote: RemotePool | None
    connection: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)


class CudaIpcReader:
    """Mappings of peers' pools by worker and rank. One thread per mapping waits for the owner's end."""

    def __init__(self, device: MappingPool) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._mappings: dict[PoolName, _Mapping] = {}

    def pull(self, pull: BlockPull) -> list[list[int]]:
        """Copy on this device. Ignores the deadline: no peer is involved, and a copy completes or fails."""
        return [self._pull_part(part, pull) for part in pull.parts]

    def _pull_part(self, part: SourcePart, pull: BlockPull) -> list[int]:
        mapping = self._mapping(part.shard)
        part.shard.check_offer(mapping.info)
        remote_ids = rows_at(part.shard.block_ids, pull.positions, mapping.info.geometry.num_blocks)
        with mapping.lock:
            if mapping.remote is None:
                raise TransferError("the owner of the KV blocks is gone")
            return self._device.pull(mapping.remote, remote_ids, pull.local_block_ids, part.copy)

    def close(self) -> None:
        with self._lock:
            mappings = list(self._mappings.values())
            self._mappings.clear()
        for mapping in mappings:
            _end(mapping)

    def _mapping(self, shard: PeerShard) -> _Mapping:
        name = shard.pool_name
        with self._lock:
            known = self._mappings.get(name)
        if known is not None and known.info.epoch == shard.epoch:
            return known
        mapping = self._map(shard)  # without the lock: a peer that does not answer must not delay others
        with self._lock:
            earlier = self._mappings.get(name)
            is_first = earlier is None or earlier.info.epoch != shard.epoch
            if is_first:
                self._mappings[name] = mapping
        if earlier is not None and not is_first:  # another thread was faster
            _end(mapping)
            mapping.connection.close()
            return earlier
        if earlier is not None:
            _end(earlier)
        threading.Thread(target=self._watch, args=[mapping], name="kv-cuda-peer", daemon=True).start()
        return mapping

    def _map(self, shard: PeerShard) -> _Mapping:
        info, fd, connection = fetch_held(shard.address_for(NAME), FETCH_SECONDS)
        try:
            shard.check_offer(info)
            remote = self._device.attach(fd, info.geometry.num_blocks, info.geometry.block_bytes)
        except BaseException:  # Ctrl-C and cancelled tasks, too: nothing may stay open
            connection.close()
            raise
        finally:
            os.close(fd)
        connection.settimeout(None)
        return _Mapping(shard.pool_name, info, remote, connection)

    def _watch(self, mapping: _Mapping) -> None:
        """Wait for the end of the connection, then end the mapping."""
        with contextlib.suppress(OSError):
            while mapping.connection.recv(64):
                pass
        with self._lock:
            if self._mappings.get(mapping.name) is mapping:
                del self._mappings[mapping.name]
                logger.info("worker %s is gone: its pool is unmapped", mapping.name[0])
        _end(mapping)
        mapping.connection.close()


def _end(mapping: _Mapping) -> None:
    """Unmap after the last read has ended, and wake the watching thread. May be called repeatedly."""
    with mapping.lock:
        remote, mapping.remote = mapping.remote, None
    if remote is not None:
        remote.close()
    with contextlib.suppress(OSError):
        mapping.connection.shutdown(socket.SHUT_RDWR)
