"""Pools of a worker's ranks, this process's and others', as transports hand them out and fill them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from engine.kv.memory import pool_over
from kvstore.handle.pool_info import PoolInfo
from kvstore.pool.digest import digest_rows
from kvstore.transports.descriptor_server import DescriptorServer
from kvstore.transports.lease_client import LeaseClient
from kvstore.transports.shared_memory import blocks_over, create_memfd, map_fd, reopen_read_only
from kvstore.transports.shm.reader import ShmReader
from kvstore.transports.transport import LocalPool, Reader
from kvstore.types import BlockId


class RankPool(LocalPool):
    """The pool of one rank on a CPU, in shared memory of this process."""

    needs_staging = False  # whether peers find leased blocks in the host memory only after they were copied there

    def __init__(self, info: PoolInfo, socket_path: str, num_rows: int = 0) -> None:
        """num_rows: of host memory, if they are not the pool itself. Raises ConfigError when there is no memory."""
        self.info = info
        self.socket_path = socket_path
        self._host = replace(info, geometry=replace(info.geometry, num_blocks=num_rows or info.geometry.num_blocks))
        geometry = self._host.geometry
        self.fd = create_memfd("mini-infer-kv", geometry.pool_bytes)
        self._mapping = map_fd(self.fd, geometry.pool_bytes, writable=True)
        self.host_blocks = blocks_over(self._mapping, geometry.num_blocks, geometry.block_bytes)
        self._server: DescriptorServer | None = None

    def tensor(self) -> Tensor:
        """The pool, see PoolGeometry."""
        return pool_over(self._mapping, self.info.geometry)

    def digests(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Digests of complete blocks."""
        return digest_rows(self.host_blocks, block_ids)

    def fence(self, first: RankPool) -> None:
        """Mark that blocks are about to be given to loads, after the steps that rank 0, `first`, has launched."""

    def through_host(self, reader: Reader) -> Reader:
        """See LocalPool."""
        return reader

    def shm_reader(self, leases: LeaseClient) -> Reader:
        """See LocalPool."""
        return ShmReader(self.host_blocks, leases)

    def serve(self) -> None:
        """Start handing out descriptors. Raises ConfigError when a socket cannot be made."""
        self._server = DescriptorServer(Path(self.socket_path), self._host, reopen_read_only(self.fd))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        os.close(self.fd)
