"""The memory of a worker's KV that peers can reach: a memfd that the front and peers of the host map, read-only.

On a CPU it is the pool. On a GPU the pool lies in device memory, and the memfd is a staging area in front of it.
Also opens the host tier: the node agent's when there is one, this process's own otherwise.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from common.errors import ConfigError
from engine.kv_memory import allocate_pool, host_buffer_over, pool_over
from engine.worker.exchange import DirectExchange, KvExchange, StagedExchange
from kvstore.block_pool import BlockPool
from kvstore.descriptor_server import DescriptorServer
from kvstore.digest import check_block_bytes
from kvstore.host_tier import HostTier, LocalHostTier
from kvstore.leases import new_epoch
from kvstore.memory import blocks_over, create_memfd, map_fd
from kvstore.pool_info import PoolInfo
from kvstore.types import PoolGeometry, WorkerId


class SharedPoolMemory:
    """One life of a worker's pool, named by its epoch."""

    def __init__(self, worker_id: str, run_dir: str, agent_socket: str, staging_bytes: int) -> None:
        self.epoch = new_epoch()
        self.socket_path = str(Path(run_dir) / f"{worker_id}.kv.sock")
        self.transports = ("shm", "tcp")
        self._worker_id = WorkerId(worker_id)
        self._agent_socket = agent_socket
        self._staging_bytes = staging_bytes
        self._kv_pool: torch.Tensor
        self._fd = -1
        self._mapping: mmap.mmap | None = None
        self._server: DescriptorServer | None = None
        self.info: PoolInfo
        self._blocks: npt.NDArray[np.uint8]  # [num_blocks, block_bytes], writable

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
        """See PoolMemory. Raises ConfigError when the memory is not there."""
        check_block_bytes(geometry.block_bytes)
        shared = geometry
        if device.type != "cpu":
            num_rows = min(self._staging_bytes // geometry.block_bytes, geometry.num_blocks)
            if num_rows == 0:
                raise ConfigError(f"--kv-staging-gb holds no block of {geometry.block_bytes / 1e9:.3f} GB")
            shared = replace(geometry, num_blocks=num_rows)
        self._fd = create_memfd("mini-infer-kv", shared.pool_bytes)
        self._mapping = map_fd(self._fd, shared.pool_bytes, writable=True)
        self.info = PoolInfo(self._worker_id, self.epoch, shared, self.transports, self.socket_path)
        self._blocks = blocks_over(self._mapping, shared.num_blocks, shared.block_bytes)
        if device.type == "cpu":
            self._kv_pool = pool_over(self._mapping, geometry)
        else:
            self._kv_pool = allocate_pool(geometry, device)
        return self._kv_pool

    def exchange(self, pool: BlockPool) -> KvExchange:
        """How blocks of `pool` get into the shared memory and out of it."""
        if self._kv_pool.device.type == "cpu":
            return DirectExchange(self._blocks, pool)
        staging = host_buffer_over(self._mapping, *self._blocks.shape)
        pin(staging)
        return StagedExchange(self._blocks, staging, self._kv_pool, pool)

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

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def pin(memory: torch.Tensor) -> None:
    """Let the GPU copy to and from `memory` directly. Raises ConfigError when the driver refuses."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        raise ConfigError(
            f"the driver does not pin {memory.numel() / 1e9:.2f} GB of host memory: lower --kv-staging-gb"
        )
