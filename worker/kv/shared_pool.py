"""The memory of a worker's KV that peers can reach, and how this worker reaches theirs.

On a CPU the pool is a memfd that the front and peers of the host map, read-only. On a GPU the pool is device memory
that peers' GPUs map, handed out over a socket of its own, and the memfd is a staging area in front of it, for all
others.
Also opens the host tier: the node agent's when there is one, this process's own otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from common.errors import ConfigError
from engine.gpu.device_memory import pool_over_device, shareable_pool
from engine.gpu.failures import describe_out_of_memory
from engine.kv.memory import allocate_pool, pool_over
from kvstore.handle.handle import HandleShard
from kvstore.layout import WHOLE, PoolGeometry
from kvstore.pool.block_pool import BlockPool
from kvstore.pool.digest import check_block_bytes
from kvstore.pool.leases import new_epoch
from kvstore.tier.host_tier import HostTier, LocalHostTier
from kvstore.transports.client import KvClient
from kvstore.transports.cuda_ipc import cuda_memory
from kvstore.transports.nccl.server import LeaseHolder, NcclServer
from kvstore.transports.nixl.agent import NixlAgent, agent_name
from kvstore.types import WorkerId
from worker.kv.kv_exporter import DeviceExporter, DirectExporter, KvExporter
from worker.nccl.pool import NcclPool
from worker.ranks.rank_pool import DeviceRankPool, HostRankPool, RankPool

logger = logging.getLogger("engine")


class SharedPoolMemory:
    """One life of a worker's pool, named by its epoch."""

    def __init__(
        self, worker_id: str, run_dir: str, agent_socket: str, staging_bytes: int, kv_transport: str = "auto"
    ) -> None:
        self.epoch = new_epoch()
        self.shares_device_pools = True
        self.socket_path = str(Path(run_dir) / f"{worker_id}.kv.sock")
        self.transports: tuple[str, ...] = ()  # best first
        self._worker_id = WorkerId(worker_id)
        self._agent_socket = agent_socket
        self._staging_bytes = staging_bytes
        self._kv_transport = kv_transport
        self._nccl_server: NcclServer | None = None
        self._nixl: NixlAgent | None = None
        self._ranks: list[RankPool] = []  # this process's first

    @property
    def needs_staging(self) -> bool:
        """Whether leases name blocks that peers do not find in host memory."""
        return isinstance(self._ranks[0], DeviceRankPool)

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
        """See PoolMemory. Raises ConfigError when the memory is not there."""
        check_block_bytes(geometry.block_bytes)
        own: RankPool
        if device.type == "cpu":
            own = host = HostRankPool(geometry, self.socket_path)
            kv_pool = pool_over(host.mapping, geometry)
        else:
            num_rows = min(self._staging_bytes // geometry.block_bytes, geometry.num_blocks)
            if num_rows == 0:
                raise ConfigError(f"--kv-staging-gb holds no block of {geometry.block_bytes / 1e9:.3f} GB")
            kv_pool, fd = self._allocate_on(device, geometry)
            with_nccl = self._kv_transport in ("auto", "nccl")
            own = DeviceRankPool(geometry, kv_pool, fd, self.socket_path, num_rows, with_nccl)
        if self._kv_transport == "nixl":
            self._nixl = NixlAgent(agent_name(self._worker_id, self.epoch))
        self._add(own)
        self.transports = self._choose_transports(own)
        return kv_pool

    def allocate_for_rank(self, geometry: PoolGeometry) -> int:
        """See PoolMemory. Ranks come in their order, after `allocate`."""
        pool = HostRankPool(geometry, self._next_socket_path())
        self._add(pool)
        return pool.fd

    def adopt_for_rank(self, geometry: PoolGeometry, device: torch.device, fd: int) -> None:
        """See PoolMemory. Ranks come in their order, after `allocate`."""
        own = self._ranks[0]
        assert isinstance(own, DeviceRankPool), "ranks are all on GPUs, or none"
        memory = cuda_memory.attach(device.index or 0, fd, geometry.pool_bytes, writable=True)
        kv_pool, path = pool_over_device(memory, geometry, device), self._next_socket_path()
        num_rows, with_nccl = len(own.host_blocks), own.nccl is not None
        self._add(DeviceRankPool(geometry, kv_pool, fd, path, num_rows, with_nccl, own.rows))

    def _add(self, pool: RankPool) -> None:
        self._ranks.append(pool)
        if self._nixl is not None:
            self._nixl.offer(pool.host_blocks)

    def _next_socket_path(self) -> str:
        return str(Path(self.socket_path).with_suffix(f".{len(self._ranks)}.sock"))

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
        shards = [HandleShard(pool.geometry, pool.address(kv_address)) for pool in self._ranks]
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
        return [rank.nccl for rank in self._ranks if rank.nccl is not None]

    def exporter(self, pool: BlockPool, end_steps: Callable[[], None] = lambda: None) -> KvExporter:
        """The exporter of blocks of `pool` to readers. end_steps: see DirectExporter."""
        on_gpus = [(rank.device_pool, rank.rows) for rank in self._ranks if isinstance(rank, DeviceRankPool)]
        if on_gpus:
            return DeviceExporter(on_gpus, pool)
        return DirectExporter([rank.host_blocks for rank in self._ranks], pool, end_steps)

    def clients(self, token: str) -> list[KvClient]:
        """Readers of peers' blocks, one into the pool of each rank."""
        return [rank.client(token, self.transports, self._nixl) for rank in self._ranks]

    def open_host_tier(self, geometry: PoolGeometry, host_tier_bytes: int) -> HostTier | None:
        """The agent's tier, or one of `host_tier_bytes` here, or None. Ranks keep their slots to themselves."""
        if self._agent_socket and geometry.shard == WHOLE:
            from kvstore.tier.agent_client import AgentHostTier  # only workers with an agent need it

            # A GPU's driver keeps the pages that it has registered, whatever is mapped there later.
            reconnects = not self.needs_staging
            return AgentHostTier(self._agent_socket, geometry.content_name, geometry.block_bytes, reconnects)
        num_slots = host_tier_bytes // geometry.block_bytes
        return LocalHostTier(num_slots, geometry.block_bytes) if num_slots else None

    def serve(self, host: str = "127.0.0.1", token: str = "") -> None:
        """Start handing out descriptors, and listen for readers by NCCL. Raises ConfigError without a socket."""
        for rank in self._ranks:
            rank.serve(self._worker_id, self.epoch)
        if self._ranks[0].nccl is not None:
            block_bytes = [rank.geometry.block_bytes for rank in self._ranks]
            self._nccl_server = NcclServer(host, token, self._worker_id, self.epoch, block_bytes)

    def send_leases(self, leases: LeaseHolder) -> None:
        """Send blocks of leases to readers by NCCL, from now on."""
        if self._nccl_server is not None:
            self._nccl_server.serve(self._nccl_pools(), leases)

    def close(self) -> None:
        if self._nccl_server is not None:
            self._nccl_server.close()
        while self._ranks:
            self._ranks.pop().close()

    def _allocate_on(self, device: torch.device, geometry: PoolGeometry) -> tuple[torch.Tensor, int]:
        """A zeroed pool, and a descriptor of it where it is possible and wanted that peers map it; else -1."""
        if self._kv_transport not in ("auto", "cuda_ipc") and geometry.shard == WHOLE:
            return allocate_pool(geometry, device), -1
        torch.cuda.init()  # type: ignore[no-untyped-call]
        if not cuda_memory.can_share(device.index or 0):
            if geometry.shard != WHOLE:
                raise ConfigError("--tp and --pp need GPUs whose memory can be shared between processes")
            logger.info("this GPU's memory cannot be shared with other processes: KV is staged in host memory")
            return allocate_pool(geometry, device), -1
        try:
            return shareable_pool(geometry, device)
        except ConfigError as error:
            raise ConfigError(f"{error}: {describe_out_of_memory()}") from error

    def _choose_transports(self, own: RankPool) -> tuple[str, ...]:
        """The wanted transports that this worker has. Raises ConfigError when none is left."""
        on_gpu = [("cuda_ipc", bool(own.address("").cuda_socket)), ("nccl", own.nccl is not None)]
        possible = (*(name for name, is_there in on_gpu if is_there), "shm", "tcp")
        if self._kv_transport == "auto":
            return possible
        if self._kv_transport == "nixl":
            return ("nixl",)
        if self._kv_transport == "nccl" and own.nccl is None:
            raise ConfigError(
                "--kv-transport nccl needs a GPU and libnccl.so.2, which torch's packages for CUDA bring: choose auto"
            )
        if self._kv_transport not in possible:
            raise ConfigError(
                f"--kv-transport {self._kv_transport} needs GPU memory that processes can share: "
                "choose auto, shm or tcp"
            )
        return (self._kv_transport,)
