"""The pool's memory in a worker: a memfd that the front and peers of the host may map, read-only.

Also opens the host tier: the node agent's when there is one, this process's own otherwise.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_memory import pool_over
from kvstore.descriptor_server import DescriptorServer
from kvstore.digest import check_block_bytes, digest_blocks
from kvstore.host_tier import HostTier, LocalHostTier
from kvstore.leases import new_epoch
from kvstore.memory import blocks_over, create_memfd, map_fd
from kvstore.pool_info import PoolInfo
from kvstore.types import BlockId, PoolGeometry, WorkerId


class SharedPoolMemory:
    """One life of a worker's pool, named by its epoch."""

    def __init__(self, worker_id: str, run_dir: str, agent_socket: str) -> None:
        self.epoch = new_epoch()
        self.socket_path = str(Path(run_dir) / f"{worker_id}.kv.sock")
        self.transports = ("shm", "tcp")
        self._worker_id = WorkerId(worker_id)
        self._agent_socket = agent_socket
        self._fd = -1
        self._mapping: mmap.mmap | None = None
        self._server: DescriptorServer | None = None
        self.info: PoolInfo
        self.blocks: npt.NDArray[np.uint8]  # [num_blocks, block_bytes], writable

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
        """See PoolMemory. Raises ConfigError when the memory is not there."""
        check_block_bytes(geometry.block_bytes)
        self._fd = create_memfd("mini-infer-kv", geometry.pool_bytes)
        self._mapping = map_fd(self._fd, geometry.pool_bytes, writable=True)
        self.info = PoolInfo(self._worker_id, self.epoch, geometry, self.transports, self.socket_path)
        self.blocks = blocks_over(self._mapping, geometry.num_blocks, geometry.block_bytes)
        return pool_over(self._mapping, geometry)

    def open_host_tier(self, geometry: PoolGeometry, host_tier_bytes: int) -> HostTier | None:
        """The agent's tier, or one of `host_tier_bytes` here, or None."""
        if self._agent_socket:
            from kvstore.agent_client import AgentHostTier  # only workers with an agent need it

            return AgentHostTier(self._agent_socket, geometry.fingerprint, geometry.block_bytes)
        num_slots = host_tier_bytes // geometry.block_bytes
        return LocalHostTier(num_slots, geometry.block_bytes) if num_slots else None

    def serve(self) -> None:
        """Start handing out the pool's descriptor. Raises ConfigError when the socket cannot be made."""
        self._server = DescriptorServer(Path(self.socket_path), self.info, self._fd)

    def digests(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Digest of each block's bytes as they are now."""
        return [digest_blocks(self.blocks[block_id : block_id + 1])[0] for block_id in block_ids]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
