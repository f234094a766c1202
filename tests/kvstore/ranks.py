"""A worker of several ranks, each with a pool of its own, whose blocks tell heads and layers apart."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from common.net.rpc import RpcServer
from kvstore.handle.handle import PeerLease, open_handle
from kvstore.layout import PoolGeometry, Shard, full_attention, latent_attention
from kvstore.pool.leases import Lease, LeaseTable, new_epoch
from kvstore.transports.block_server import BlockServer
from kvstore.transports.descriptor_server import DescriptorServer
from kvstore.transports.service import KvTransferService, PoolView
from kvstore.transports.shared_memory import reopen_read_only
from kvstore.types import BlockId, Epoch, LeaseId
from protos import kvstore_pb2_grpc
from tests.kvstore.helpers import Owner, as_handle, with_address

LAYERS, BLOCK_SIZE, HEAD_DIM = 3, 4, 8
LATENTS = 0  # as a number of heads: one vector a token instead, in one plane


def geometry_of(heads: int, shard: Shard, num_blocks: int = 6) -> PoolGeometry:
    if heads == LATENTS:
        layout = latent_attention(LAYERS, HEAD_DIM, "bfloat16")
    else:
        layout = full_attention(LAYERS, heads, HEAD_DIM, "bfloat16")
    return PoolGeometry(layout, num_blocks, BLOCK_SIZE, "f", shard)


def whole_blocks(heads: int, num_blocks: int = 6) -> torch.Tensor:
    """What a pool of all heads holds; every element is another one."""
    shape = (num_blocks, *geometry_of(heads, Shard()).block_shape)
    return torch.arange(int(np.prod(shape)), dtype=torch.int16).view(shape)


def bytes_of(blocks: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return blocks.contiguous().view(len(blocks), -1).view(torch.uint8).numpy()


def shard_of(blocks: torch.Tensor, geometry: PoolGeometry) -> np.ndarray:  # type: ignore[type-arg]
    layers, heads = geometry.layers, geometry.heads
    return bytes_of(blocks[:, layers.start : layers.stop, :, heads.start : heads.stop])


class Ranks:
    """A worker of several ranks, each with a pool of its own, behind one KvTransfer service."""

    def __init__(self, folder: Path, heads: int, shards: Sequence[Shard]) -> None:
        self.blocks = whole_blocks(heads)
        self.epoch = new_epoch()
        self.owners = []
        for rank, shard in enumerate(shards):
            geometry = geometry_of(heads, shard)
            owner = Owner(folder, geometry, f"w-{rank}", epoch=self.epoch, worker_id="w")
            owner.blocks[:] = shard_of(self.blocks, geometry)
            self.owners.append(owner)
        self.device_servers = [
            DescriptorServer(folder / f"{rank}.cuda.sock", owner.info, reopen_read_only(owner.fd), holds=True)
            for rank, owner in enumerate(self.owners)
        ]
        self.leases = LeaseTable(self.epoch)
        self.server = RpcServer("127.0.0.1", 0)
        self.pools, self.sender = [PoolView(str(owner.socket)) for owner in self.owners], BlockServer("127.0.0.1")
        self.service = KvTransferService(
            self.pools, self.sender, self.leases, self._ignore_renewal, self._ignore_release
        )
        adder = kvstore_pb2_grpc.add_KvTransferServicer_to_server
        self.server.add(adder, self.service, "mini_infer.v1.KvTransfer")

    def _ignore_renewal(self, lease_id: LeaseId, epoch: Epoch, seconds: float) -> None: ...

    def _ignore_release(self, lease_id: LeaseId, epoch: Epoch) -> None: ...

    def lease(self, block_ids: list[int], transport: str) -> PeerLease:
        """As a reader gets it, through its bytes."""
        self.leases.adopt(
            Lease(LeaseId("lease"), self.leases.epoch, tuple(map(BlockId, block_ids)), time.monotonic() + 60)
        )
        address = self.server.address if transport == "tcp" else ""
        leases = [o.peer(block_ids, kv_address=address, shm=transport == "shm") for o in self.owners]
        if transport == "cuda_ipc":
            paths = [server.socket_path for server in self.device_servers]
            leases = [with_address(o, cuda_ipc=path) for o, path in zip(leases, paths, strict=True)]
        return open_handle(as_handle(replace(leases[0], shards=tuple(lease.shards[0] for lease in leases))))


@asynccontextmanager
async def running(folder: Path, heads: int, size: int, shards: Sequence[Shard] = ()) -> AsyncIterator[Ranks]:
    worker = Ranks(folder, heads, shards or [Shard(rank, size) for rank in range(size)])
    await worker.server.start()
    try:
        yield worker
    finally:
        await worker.server.stop(0)
        worker.sender.close()
        for server in worker.device_servers:
            server.close()
        for pool in worker.pools:
            pool.close()
        for owner in worker.owners:
            owner.close()
