"""A worker of several ranks, each with its own pool, whose blocks differ by head and layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.wings import has_wing
from kvstore.handle.handle import PeerLease, open_handle
from kvstore.layout import PoolGeometry, Shard, full_attention, latent_attention
from kvstore.pool.leases import new_epoch
from kvstore.transports.shared_memory import reopen_read_only
from tests.kvstore.helpers import Front, Owner, as_handle, with_address

LAYERS, BLOCK_SIZE, HEAD_DIM = 3, 4, 8
LATENTS = 0  # as a number of heads: one vector a token instead, in one plane


def geometry_of(heads: int, shard: Shard, num_blocks: int = 6) -> PoolGeometry:
    if heads == LATENTS:
        layout = latent_attention(LAYERS, HEAD_DIM, "bfloat16")
    else:
        layout = full_attention(LAYERS, heads, HEAD_DIM, "bfloat16")
    return PoolGeometry(layout, num_blocks, BLOCK_SIZE, "f", shard)


def whole_blocks(heads: int, num_blocks: int = 6) -> torch.Tensor:
    """Return the blocks of a pool of all heads; all elements differ."""
    shape = (num_blocks, *geometry_of(heads, Shard()).block_shape)
    return torch.arange(int(np.prod(shape)), dtype=torch.int16).view(shape)


def bytes_of(blocks: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return blocks.contiguous().view(len(blocks), -1).view(torch.uint8).numpy()


def shard_of(blocks: torch.Tensor, geometry: PoolGeometry) -> np.ndarray:  # type: ignore[type-arg]
    layers, heads = geometry.layers, geometry.heads
    return bytes_of(blocks[:, layers.start : layers.stop, :, heads.start : heads.stop])


class Ranks(Front):
    """A worker of several ranks, each with a pool of its own."""

    def __init__(self, folder: Path, heads: int, shards: Sequence[Shard]) -> None:
        self.blocks = whole_blocks(heads)
        epoch, owners = new_epoch(), []
        for rank, shard in enumerate(shards):
            geometry = geometry_of(heads, shard)
            owner = Owner(folder, geometry, f"w-{rank}", epoch=epoch, worker_id="w")
            owner.blocks[:] = shard_of(self.blocks, geometry)
            owners.append(owner)
        super().__init__(owners)
        self.epoch = epoch
        self.device_servers: list[Any] = []
        if has_wing("kvstore.transports.cuda_ipc"):
            from kvstore.transports.cuda_ipc.held_server import HeldServer

            self.device_servers = [
                HeldServer(folder / f"{rank}.cuda.sock", owner.info, reopen_read_only(owner.fd))
                for rank, owner in enumerate(owners)
            ]

    def lease(self, block_ids: list[int], transport: str) -> PeerLease:
        """Return the lease as a reader decodes it from bytes."""
        self.adopt(block_ids)
        address = self.server.address if transport == "tcp" else ""
        leases = [o.peer(block_ids, kv_address=address, shm=transport == "shm") for o in self.owners]
        if transport == "cuda_ipc":
            paths = [server.socket_path for server in self.device_servers]
            leases = [with_address(o, cuda_ipc=path) for o, path in zip(leases, paths, strict=True)]
        return open_handle(as_handle(replace(leases[0], shards=tuple(lease.shards[0] for lease in leases))))

    async def __aexit__(self, *error: object) -> None:
        for server in self.device_servers:
            server.close()
        await super().__aexit__(*error)


def running(folder: Path, heads: int, size: int, shards: Sequence[Shard] = ()) -> Ranks:
    return Ranks(folder, heads, shards or [Shard(rank, size) for rank in range(size)])
