"""The pool of a rank in another process on a CPU: this process allocates it, hands it to peers and fills it."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.layout import PoolGeometry
from kvstore.transport.descriptor_server import DescriptorServer
from kvstore.transport.handle import ShardAddress
from kvstore.transport.pool_info import PoolInfo
from kvstore.transport.shared_memory import blocks_over, create_memfd, map_fd, reopen_read_only
from kvstore.types import Epoch, WorkerId


class RankPool:
    """blocks: uint8 [num_blocks, block_bytes], zeroed; fd: of the same memory."""

    def __init__(self, geometry: PoolGeometry, socket_path: str) -> None:
        """Raises ConfigError when the memory is not there."""
        self.geometry = geometry
        self.fd = create_memfd("mini-infer-kv", geometry.pool_bytes)
        mapping = map_fd(self.fd, geometry.pool_bytes, writable=True)
        self.blocks = blocks_over(mapping, geometry.num_blocks, geometry.block_bytes)
        self._socket_path = socket_path
        self._server: DescriptorServer | None = None

    def address(self, kv_address: str) -> ShardAddress:
        """Where peers can read it; `kv_address` is the front's."""
        return ShardAddress(kv_address, self._socket_path)

    def serve(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Start handing out its descriptor. Raises ConfigError when the socket cannot be made."""
        info = PoolInfo(worker_id, epoch, self.geometry)
        self._server = DescriptorServer(Path(self._socket_path), info, reopen_read_only(self.fd))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        os.close(self.fd)
