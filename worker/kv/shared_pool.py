"""A worker's KV pool that peers can read, and the clients that read the pools of peers.

On a CPU the pool is a memfd that the front and peers on the host map read-only. On a GPU it is device memory, which
`worker/gpu_hand_off` makes readable for peers; without that wing, only this process uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from common.errors import ConfigError
from common.wings import from_wing, has_wing, require_wing
from engine.kv.memory import PoolMemory, allocate_pool, pool_over
from kvstore.handle.handle import HandleShard, HandleWriter, PoolInfo, ShardAddress
from kvstore.layout import PoolGeometry
from kvstore.pool.digest import check_block_bytes
from kvstore.pool.leases import new_epoch
from kvstore.transports.client import KvClient
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.transport import LocalPool, Reader, Transport
from kvstore.types import BlockId, WorkerId
from worker.config import AUTO, TRANSPORTS, WorkerConfig
from worker.kv.kv_leases import KvLeases

logger = logging.getLogger("engine")


def load_transports(wanted: str) -> list[type[Transport]]:
    """Import the installed transports, best first. Raises ConfigError if `wanted` names one that is missing."""
    if wanted != AUTO:
        require_wing(TRANSPORTS[wanted].partition(":")[0], f"--kv-transport {wanted}")
    return [kind for path in TRANSPORTS.values() if (kind := from_wing(path))]


class SharedPoolMemory(PoolMemory):
    """The pools of all ranks of a worker, in one epoch."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises ConfigError for a transport that cannot be used here."""
        self.epoch = new_epoch()
        self.agent_socket = config.agent_socket
        self.shares_device_pools = has_wing("worker.gpu_hand_off")
        self.ranks: list[LocalPool] = []  # this process's first
        self.clients: list[KvClient] = []  # pull peers' blocks, one into each rank's pool
        self.leases = LeaseClient(config.cluster_token)  # for leases of peers
        self._config = config
        named, kinds = config.kv_transport, load_transports(config.kv_transport)
        self._wanted = [k for k in kinds if named == k.name or (named == AUTO and k.offered != "named")]
        self._transports: dict[str, Transport] = {
            kind.name: kind(config.host, config.cluster_token)
            for kind in kinds
            if kind in self._wanted or kind.offered == "always"
        }

    @property
    def needs_staging(self) -> bool:
        """Whether leased blocks are in GPU memory, so that they must be copied to host memory for some peers."""
        return any(rank.needs_staging for rank in self.ranks)

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
        """See PoolMemory. Raises ConfigError if the machine does not have the memory."""
        check_block_bytes(geometry.block_bytes)
        if device.type == "cpu":
            return pool_over(self._add(LocalPool(*self._next(geometry))).mapping, geometry)
        allocate_on = from_wing("worker.gpu_hand_off.allocation:allocate_on")
        if allocate_on is None:
            if self._config.kv_transport != AUTO:
                require_wing("worker.gpu_hand_off", f"--kv-transport {self._config.kv_transport} on a GPU")
            logger.warning("KV in GPU memory is not handed over: this installation lacks worker.gpu_hand_off")
            self.clients.append(KvClient(geometry, {}))  # without transports, so that prompts are computed here
            return allocate_pool(geometry, device)
        pool = allocate_on(device, *self._next(geometry), self._config, [kind.name for kind in self._wanted])
        self._add(pool)
        kv_pool: torch.Tensor = pool.kv_pool
        return kv_pool

    def allocate_for_rank(self, geometry: PoolGeometry) -> int:
        """See PoolMemory. Ranks come in their order, after `allocate`."""
        return self._add(LocalPool(*self._next(geometry))).fd

    def adopt_for_rank(self, geometry: PoolGeometry, device: torch.device, fd: int) -> None:
        """See PoolMemory. Ranks come in their order, after `allocate`."""
        adopt_on = from_wing("worker.gpu_hand_off.allocation:adopt_on")
        self._add(adopt_on(device, *self._next(geometry), fd, self.ranks[0]))

    def _add(self, pool: LocalPool) -> LocalPool:
        """Add the next rank's pool, and open its readers. Raises ConfigError if there is none."""
        self.ranks.append(pool)
        opened = {kind.name: self._transports[kind.name].reader(pool, self.leases) for kind in self._wanted}
        readers: dict[str, Reader] = {name: reader for name, reader in opened.items() if reader is not None}
        if not readers:
            raise ConfigError(f"--kv-transport {self._config.kv_transport} needs {self._wanted[0].needs}")
        kind = from_wing("kvstore.transports.fallbacks.client:FallbackClient") or KvClient
        self.clients.append(kind(pool.info.geometry, readers))
        return pool

    def _next(self, geometry: PoolGeometry) -> tuple[PoolInfo, str]:
        """Return the description and the socket path of the next rank's pool."""
        worker_id, rank = self._config.worker_id, f".{len(self.ranks)}" if self.ranks else ""
        path = Path(self._config.run_dir) / f"{worker_id}.kv{rank}.sock"
        return PoolInfo(WorkerId(worker_id), self.epoch, geometry), str(path)

    @property
    def descriptions(self) -> dict[str, bytes]:
        """Data of transports, by name, for peers that have the cluster's token."""
        return {name: data for name, transport in self._transports.items() if (data := transport.describe())}

    def open_leases(self, release: Callable[[Sequence[BlockId]], None], handles: HandleWriter) -> KvLeases:
        """Create the leases on blocks of these pools, see KvLeases; from now on transports may send the blocks."""
        kind = from_wing("worker.gpu_hand_off.staged_leases:StagedLeases") if self.needs_staging else KvLeases
        leases: KvLeases = kind(self.epoch, self.ranks, release, handles)
        for transport in self._transports.values():
            transport.serve(leases)
        return leases

    def fence(self) -> None:
        """Order the next loads after the steps launched so far. On a CPU these have ended."""
        for rank in self.ranks:
            rank.fence(self.ranks[0])

    def serve(self, kv_address: str) -> list[HandleShard]:
        """Let peers read all pools; return their addresses. kv_address: the front's. Raises ConfigError."""
        shards = []
        for rank in self.ranks:
            rank.serve()
            exported = {name: transport.export(rank) for name, transport in self._transports.items()}
            addresses = {name: address for name, address in exported.items() if address is not None}
            address = ShardAddress(kv_address, self.needs_staging, addresses)
            shards.append(HandleShard(rank.info.geometry, address))
        return shards

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        self.leases.close()
        while self.ranks:
            self.ranks.pop().close()
