"""The two sides of a KV transfer, with the workers' own code: an owner in a separate process, and a reader."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence

import torch

from common.net.rpc import RpcServer
from kvstore.handle.handle import HandleWriter, PeerLease
from kvstore.layout import PoolGeometry
from kvstore.pool.block_pool import BlockPool
from kvstore.pool.leases import LeaseTable
from kvstore.transports.tcp.block_server import BlockServer
from kvstore.transports.tcp.service import PoolView, TcpTransferService
from kvstore.types import BlockId, Epoch, LeaseId
from protos import kvstore_pb2_grpc
from protos import types_pb2 as pb
from worker.config import WorkerConfig
from worker.gpu_hand_off.staging_table import StagingTable
from worker.kv.shared_pool import SharedPoolMemory

LEASE_SECONDS = 600.0


class Owner:
    """The side that has computed a prompt: a pool of random bytes, its service, one lease after another."""

    def __init__(self, geometry: PoolGeometry, device: torch.device, folder: str, transport: str) -> None:
        self._memory = open_memory("owner", geometry, folder, transport)
        kv_pool = self._memory.allocate(geometry, device)
        as_words(kv_pool).random_()
        self._pool = BlockPool(geometry.num_blocks)
        self._mirror = LeaseTable(self._memory.epoch)
        self._server = RpcServer("127.0.0.1", 0)
        handles = HandleWriter("owner", self._memory.serve(self._server.address), LEASE_SECONDS)
        self._leases = self._memory.open_leases(self._pool.release, handles)
        self._staging = StagingTable(self._stage)

    async def start(self) -> None:
        stage = self._staging.rows if self._memory.needs_staging else None
        view, sender = PoolView(self._memory.ranks[0].socket_path), BlockServer("127.0.0.1")
        service = TcpTransferService(
            sender=sender, pools=[view], leases=self._mirror, on_renew=self._renewed, on_release=self._released,
            stage=stage, descriptions=self._memory.descriptions,
        )  # fmt: skip
        self._server.add(
            kvstore_pb2_grpc.add_KvTransferServicer_to_server, service, "mini_infer.v1.KvTransfer"
        )  # fmt: skip
        await self._server.start()

    def grant(self, num_blocks: int) -> tuple[pb.KvHandle, float]:
        """Return a lease on `num_blocks` blocks, and the seconds that granting took."""
        self._leases.expire(time.monotonic())  # gives up leases that were still being sent when released
        blocks = self._pool.allocate(num_blocks)
        began = time.perf_counter()
        digests = self._leases.digests(blocks)
        seconds = time.perf_counter() - began
        lease, handle = self._leases.grant(blocks, digests, 0, time.monotonic())
        self._mirror.adopt(dataclasses.replace(lease))
        return handle, seconds

    def _renewed(self, lease_id: LeaseId, epoch: Epoch, seconds: float) -> None:
        """Do nothing: leases of this benchmark do not expire."""

    def _released(self, lease_id: LeaseId, epoch: Epoch) -> None:
        assert self._leases.release(lease_id, epoch)
        self._staging.end(lease_id)

    def _stage(self, lease_id: LeaseId, first: int) -> None:
        self._staging.answer(lease_id, first, self._leases.stage(lease_id, first))


async def serve_owner(geometry: PoolGeometry, device: torch.device, folder: str, transport: str) -> None:
    """Answer each line of stdin, a number of blocks, with a handle."""
    owner = Owner(geometry, device, folder, transport)
    await owner.start()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        handle, seconds = owner.grant(int(line))
        print(handle.SerializeToString().hex(), seconds, flush=True)


class Reader:
    """The side that continues the request: its own pool, filled by one transport."""

    def __init__(self, geometry: PoolGeometry, device: torch.device, folder: str, transport: str) -> None:
        self.memory = open_memory(f"reader-{transport}", geometry, folder, transport)
        self.kv_pool = self.memory.allocate(geometry, device)
        self._client = self.memory.clients[0]

    def pull(self, leases: Sequence[PeerLease]) -> list[float]:
        """Return the seconds of consecutive pulls."""
        positions = list(range(leases[0].num_blocks))
        local = [BlockId(block) for block in reversed(positions)]
        times: list[float] = []
        for lease in leases:
            began = time.perf_counter()
            used = self._client.pull(lease, positions, local)
            times.append(time.perf_counter() - began)
            assert used in self._client.transports
        for lease in leases:
            self.memory.leases.release(lease)
        return times

    def close(self) -> None:
        self._client.close()
        self.memory.close()


def open_memory(name: str, geometry: PoolGeometry, folder: str, transport: str) -> SharedPoolMemory:
    staging_gb = min(geometry.pool_bytes, 1 << 30) / 1e9
    config = WorkerConfig(worker_id=name, run_dir=folder, kv_staging_gb=staging_gb, kv_transport=transport)  # type: ignore[call-arg]
    return SharedPoolMemory(config)


def as_words(kv_pool: torch.Tensor) -> torch.Tensor:
    return kv_pool.view(kv_pool.shape[0], -1).view(torch.int64)
