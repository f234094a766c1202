"""The memory of a worker's KV that peers can reach, and how this worker reaches theirs.

On a CPU the pool is a memfd that the front and peers of the host map, read-only. On a GPU the pool is device memory
that peers' GPUs map, handed out over a socket of its own, and the memfd is a staging area in front of it, for all
others.
Also opens the host tier: the node agent's when there is one, this process's own otherwise.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from common.errors import ConfigError
from engine.gpu.device_memory import shareable_pool
from engine.gpu.failures import describe_out_of_memory
from engine.gpu.pinning import pin
from engine.kv.memory import allocate_pool, host_buffer_over, pool_over
from kvstore.layout import WHOLE, PoolGeometry
from kvstore.pool.block_pool import BlockPool
from kvstore.pool.digest import check_block_bytes
from kvstore.pool.leases import new_epoch
from kvstore.tier.host_tier import HostTier, LocalHostTier
from kvstore.transport import cuda_memory
from kvstore.transport.client import KvClient, host_client
from kvstore.transport.descriptor_server import DescriptorServer
from kvstore.transport.handle import HandleShard, ShardAddress
from kvstore.transport.nccl_server import LeaseHolder, NcclServer
from kvstore.transport.nixl_agent import NixlAgent, agent_name
from kvstore.transport.pool_info import PoolInfo
from kvstore.transport.shared_memory import blocks_over, create_memfd, map_fd, reopen_read_only
from kvstore.types import WorkerId
from worker.device_pool import DevicePool
from worker.kv_exporter import DeviceExporter, DirectExporter, HostRows, KvExporter
from worker.nccl_pool import NcclPool, open_nccl
from worker.rank_pool import DeviceRankPool, HostRankPool, RankPool, device_client

logger = logging.getLogger("engine")


class SharedPoolMemory:
    """One life of a worker's pool, named by its epoch."""

    def __init__(
        self, worker_id: str, run_dir: str, agent_socket: str, staging_bytes: int, kv_transport: str = "auto"
    ) -> None:
        self.epoch = new_epoch()
        self.shares_device_pools = True
        self.socket_path = str(Path(run_dir) / f"{worker_id}.kv.sock")
        self.cuda_socket_path = ""  # set when the pool is in device memory that can be shared
        self.transports: tuple[str, ...] = ()  # best first
        self._worker_id = WorkerId(worker_id)
        self._agent_socket = agent_socket
        self._staging_bytes = staging_bytes
        self._kv_transport = kv_transport
        self._geometry: PoolGeometry
        self._kv_pool: torch.Tensor
        self._device_pool: DevicePool | None = None
        self._nccl: NcclPool | None = None
        self._nccl_server: NcclServer | None = None
        self._nixl: NixlAgent | None = None
        self._rows: HostRows
        self._fd = -1
        self._device_fd = -1
        self._mapping: mmap.mmap | None = None
        self._servers: list[DescriptorServer] = []
        self._others: list[RankPool] = []  # of ranks 1, 2, ...
        self._shared: PoolGeometry  # of the memfd
        self._blocks: npt.NDArray[np.uint8]  # [num_blocks, block_bytes], writable

    @property
    def needs_staging(self) -> bool:
        """Whether leases name blocks that are not in the memfd."""
        return self._device_pool is not None

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
        """See PoolMemory. Raises ConfigError when the memory is not there."""
        check_block_bytes(geometry.block_bytes)
        self._geometry = shared = geometry
        if device.type != "cpu":
            num_rows = min(self._staging_bytes // geometry.block_bytes, geometry.num_blocks)
            if num_rows == 0:
                raise ConfigError(f"--kv-staging-gb holds no block of {geometry.block_bytes / 1e9:.3f} GB")
            shared = replace(geometry, num_blocks=num_rows)
        self._fd = create_memfd("mini-infer-kv", shared.pool_bytes)
        self._mapping = map_fd(self._fd, shared.pool_bytes, writable=True)
        self._blocks = blocks_over(self._mapping, shared.num_blocks, shared.block_bytes)
        if device.type == "cpu":
            self._kv_pool = pool_over(self._mapping, geometry)
        else:
            self._kv_pool = self._allocate_on(device)
            self._device_pool = DevicePool(self._kv_pool)
            self._nccl = open_nccl(self._device_pool) if self._kv_transport in ("auto", "nccl") else None
            staging = host_buffer_over(self._mapping, *self._blocks.shape)
            pin(staging)
            self._rows = HostRows(self._blocks, staging)
        if self._kv_transport == "nixl":
            self._nixl = NixlAgent(agent_name(self._worker_id, self.epoch))
            self._nixl.offer(self._blocks)
        self.transports = self._choose_transports()
        self._shared = shared
        return self._kv_pool

    def allocate_for_rank(self, geometry: PoolGeometry) -> int:
        """See PoolMemory. Ranks come in their order, after `allocate`."""
        pool = HostRankPool(geometry, self._next_socket_path())
        self._add_rank(pool)
        return pool.fd

    def adopt_for_rank(self, geometry: PoolGeometry, device: torch.device, fd: int) -> None:
        """See PoolMemory. Ranks come in their order, after `allocate`."""
        staging = replace(self._shared, shard=geometry.shard)
        path = self._next_socket_path()
        self._add_rank(DeviceRankPool(geometry, device, fd, path, staging, self._rows, self._nccl is not None))

    def _add_rank(self, pool: RankPool) -> None:
        self._others.append(pool)
        if self._nixl is not None:
            self._nixl.offer(pool.host_blocks)

    def _next_socket_path(self) -> str:
        return str(Path(self.socket_path).with_suffix(f".{len(self._others) + 1}.sock"))

    @property
    def socket_paths(self) -> list[str]:
        """Sockets that hand out descriptors of all ranks' pools."""
        return [shard.address.shm_socket for shard in self.shards("")]

    @property
    def nixl_memory(self) -> bytes:
        """How NIXL reads the pools of all ranks; empty: not at all."""
        return b"" if self._nixl is None else self._nixl.describe()

    def shards(self, kv_address: str) -> list[HandleShard]:
        """The pools of all ranks, and where peers can read them; `kv_address` is the front's."""
        address = ShardAddress(kv_address, self.socket_path, self.cuda_socket_path, self.needs_staging)
        shards = [HandleShard(self._geometry, address)]
        shards += [HandleShard(pool.geometry, pool.address(kv_address)) for pool in self._others]
        if self._nixl is not None:
            name = self._nixl.name
            return [replace(shard, address=replace(shard.address, nixl_agent=name)) for shard in shards]
        if self._nccl_server is None:
            return shards
        at = f"{kv_address.rpartition(':')[0]}:{self._nccl_server.port}"
        return [
            replace(shard, address=replace(shard.address, nccl_address=at, gpu=nccl.gpu))
            for shard, nccl in zip(shards, self._nccl_pools(), strict=True)
        ]

    def _nccl_pools(self) -> list[NcclPool]:
        """NCCL endpoints of all ranks; none where it is not installed, or not wanted."""
        others = [other.nccl for other in self._others if isinstance(other, DeviceRankPool)]
        return [pool for pool in (self._nccl, *others) if pool is not None]

    def exporter(self, pool: BlockPool, end_steps: Callable[[], None] = lambda: None) -> KvExporter:
        """The exporter of blocks of `pool` to readers. end_steps: see DirectExporter."""
        if self._device_pool is None:
            others = [other.blocks for other in self._others if isinstance(other, HostRankPool)]
            return DirectExporter([self._blocks, *others], pool, end_steps)
        ranks = [(other.device_pool, other.rows) for other in self._others if isinstance(other, DeviceRankPool)]
        return DeviceExporter([(self._device_pool, self._rows), *ranks], pool)

    def clients(self, token: str) -> list[KvClient]:
        """Readers of peers' blocks, one into the pool of each rank."""
        if self._device_pool is None:
            mine = host_client(self._geometry, self._blocks, token, self.transports, self._nixl)
        else:
            mine = device_client(
                self._geometry, self._device_pool, self._nccl, self._rows, token, self.transports, self._nixl
            )
        return [mine, *(other.client(token, self.transports, self._nixl) for other in self._others)]

    def open_host_tier(self, geometry: PoolGeometry, host_tier_bytes: int) -> HostTier | None:
        """The agent's tier, or one of `host_tier_bytes` here, or None. Ranks keep their slots to themselves."""
        if self._agent_socket and geometry.shard == WHOLE:
            from kvstore.tier.agent_client import AgentHostTier  # only workers with an agent need it

            # A GPU's driver keeps the pages that it has registered, whatever is mapped there later.
            on_cpu = self._device_pool is None
            return AgentHostTier(self._agent_socket, geometry.content_name, geometry.block_bytes, reconnects=on_cpu)
        num_slots = host_tier_bytes // geometry.block_bytes
        return LocalHostTier(num_slots, geometry.block_bytes) if num_slots else None

    def serve(self, host: str = "127.0.0.1", token: str = "") -> None:
        """Start handing out descriptors, and listen for readers by NCCL. Raises ConfigError without a socket."""
        read_only = reopen_read_only(self._fd)
        info = PoolInfo(self._worker_id, self.epoch, self._shared)
        self._servers.append(DescriptorServer(Path(self.socket_path), info, read_only))
        for pool in self._others:
            pool.serve(self._worker_id, self.epoch)
        if self._device_fd >= 0:
            info = PoolInfo(self._worker_id, self.epoch, self._geometry)
            fd, self._device_fd = self._device_fd, -1
            self._servers.append(DescriptorServer(Path(self.cuda_socket_path), info, fd, holds=True))
        if self._nccl is not None:
            block_bytes = [self._geometry.block_bytes, *(pool.geometry.block_bytes for pool in self._others)]
            self._nccl_server = NcclServer(host, token, self._worker_id, self.epoch, block_bytes)

    def send_leases(self, leases: LeaseHolder) -> None:
        """Send blocks of leases to readers by NCCL, from now on."""
        if self._nccl_server is not None:
            self._nccl_server.serve(self._nccl_pools(), leases)

    def close(self) -> None:
        if self._nccl_server is not None:
            self._nccl_server.close()
        for server in self._servers:
            server.close()
        for pool in self._others:
            pool.close()
        for fd in (self._fd, self._device_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._device_fd = -1

    def _allocate_on(self, device: torch.device) -> torch.Tensor:
        """A zeroed pool, in memory that peers can map where that is possible and wanted."""
        geometry, index = self._geometry, device.index or 0
        if self._kv_transport not in ("auto", "cuda_ipc") and geometry.shard == WHOLE:
            return allocate_pool(geometry, device)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        if not cuda_memory.can_share(index):
            if geometry.shard != WHOLE:
                raise ConfigError("--tp and --pp need GPUs whose memory can be shared between processes")
            logger.info("this GPU's memory cannot be shared with other processes: KV is staged in host memory")
            return allocate_pool(geometry, device)
        try:
            pool, self._device_fd = shareable_pool(geometry, device)
        except ConfigError as error:
            raise ConfigError(f"{error}: {describe_out_of_memory()}") from error
        self.cuda_socket_path = str(Path(self.socket_path).with_suffix(".cuda.sock"))
        return pool

    def _choose_transports(self) -> tuple[str, ...]:
        """The wanted transports that this worker has. Raises ConfigError when none is left."""
        on_gpu = [("cuda_ipc", bool(self.cuda_socket_path)), ("nccl", self._nccl is not None)]
        possible = (*(name for name, is_there in on_gpu if is_there), "shm", "tcp")
        if self._kv_transport == "auto":
            return possible
        if self._kv_transport == "nixl":
            return ("nixl",)
        if self._kv_transport == "nccl" and self._nccl is None:
            raise ConfigError(
                "--kv-transport nccl needs a GPU and libnccl.so.2, which torch's packages for CUDA bring: choose auto"
            )
        if self._kv_transport not in possible:
            raise ConfigError(
                f"--kv-transport {self._kv_transport} needs GPU memory that processes can share: "
                "choose auto, shm or tcp"
            )
        return (self._kv_transport,)
