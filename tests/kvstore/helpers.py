"""A small pool in shared memory, and handles on it, for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from common.net.rpc import RpcServer
from common.wings import from_wing, has_wing
from kvstore.handle.handle import PeerLease, PeerShard, PoolInfo, ShardAddress, open_handle, pack_shard
from kvstore.layout import PoolGeometry, full_attention
from kvstore.pool.digest import digest_blocks
from kvstore.pool.leases import Lease, LeaseTable, new_epoch
from kvstore.transports.client import KvClient
from kvstore.transports.kv_transfer import KvTransferService, LeaseClient
from kvstore.transports.shared_memory import DescriptorServer, blocks_over, create_memfd, map_fd, reopen_read_only
from kvstore.transports.shm import ShmReader
from kvstore.transports.transport import BlockPull, Blocks, Reader, SourcePart
from kvstore.types import BlockId, Epoch, LeaseId, WorkerId
from protos import kvstore_pb2_grpc
from protos import types_pb2 as pb

GEOMETRY = PoolGeometry(full_attention(2, 2, 8, "float32"), 8, 4, "test-model")  # blocks of 1 KB
HAS_TCP = has_wing("kvstore.transports.tcp")
Stage = Callable[[LeaseId, int], Awaitable[list[BlockId]]]  # of KvTransferService
OTHER_DTYPE = replace(GEOMETRY, layout=full_attention(2, 2, 8, "bfloat16"))


class Owner:
    """The side that owns a pool: memory, its descriptor server, leases."""

    def __init__(
        self,
        folder: Path,
        geometry: PoolGeometry = GEOMETRY,
        name: str = "owner",
        seed: int = 0,
        epoch: Epoch | None = None,
        worker_id: str = "",
    ) -> None:
        self.epoch = epoch or new_epoch()
        self.socket = folder / f"{name}.sock"
        self.fd = create_memfd("test", geometry.pool_bytes)
        self.blocks = blocks_over(
            map_fd(self.fd, geometry.pool_bytes, True), geometry.num_blocks, geometry.block_bytes
        )
        self.blocks[:] = np.random.default_rng(seed).integers(0, 256, self.blocks.shape, dtype=np.uint8)
        self.info = PoolInfo(WorkerId(worker_id or name), self.epoch, geometry)
        self.server = DescriptorServer(self.socket, self.info, reopen_read_only(self.fd))
        self.leases = LeaseTable(self.epoch)

    def peer(
        self, block_ids: Sequence[int], lease_id: str = "lease", kv_address: str = "", shm: bool = True
    ) -> PeerLease:
        ids, digests = tuple(map(BlockId, block_ids)), tuple(digest_blocks(self.blocks[list(block_ids)]))
        offered = {"shm": os.fsencode(self.socket)} if shm else {}
        address = ShardAddress(kv_address, transports=offered | ({"tcp": b""} if kv_address else {}))
        name = (LeaseId(lease_id), self.info.worker_id, self.epoch)
        shard = PeerShard(*name, self.info.geometry, address, ids, digests)
        return PeerLease(*name, 4 * len(block_ids), 10.0, (shard,))

    def close(self) -> None:
        self.server.close()
        os.close(self.fd)


class Front:
    """Pools served by one KvTransfer service. Messages for the engine are recorded."""

    def __init__(self, owners: Sequence[Owner], token: str = "", stage: Stage | None = None) -> None:
        self.owners = owners
        self.leases = LeaseTable(owners[0].epoch)
        self.told: list[tuple[str, str]] = []
        self._views: list[Any] = []  # of the pools
        self.server = RpcServer("127.0.0.1", 0, token)
        self.service = self._service(stage)
        adder = kvstore_pb2_grpc.add_KvTransferServicer_to_server
        self.server.add(adder, self.service, "mini_infer.v1.KvTransfer")

    def _service(self, stage: Stage | None) -> KvTransferService:
        """Make the service, which sends blocks by TCP if that wing is there."""
        arguments: dict[str, Any] = {
            "leases": self.leases, "on_renew": self._renewed, "on_release": self._released, "stage": stage,
        }  # fmt: skip
        if not HAS_TCP:
            return KvTransferService(**arguments)
        from kvstore.transports.tcp.block_server import BlockServer
        from kvstore.transports.tcp.service import PoolView, TcpTransferService

        pools = [PoolView(str(owner.socket)) for owner in self.owners]
        self._views += pools
        return TcpTransferService(sender=BlockServer("127.0.0.1"), pools=pools, **arguments)

    def adopt(self, block_ids: Sequence[int], seconds: float = 60.0) -> None:
        """Register a lease."""
        ids, deadline = tuple(map(BlockId, block_ids)), time.monotonic() + seconds
        self.leases.adopt(Lease(LeaseId("lease"), self.leases.epoch, ids, deadline))

    def _renewed(self, lease_id: LeaseId, epoch: Epoch, seconds: float) -> None:
        self.told.append(("renew", lease_id))

    def _released(self, lease_id: LeaseId, epoch: Epoch) -> None:
        self.told.append(("release", lease_id))

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)
        self.service.close()
        for view in self._views:
            view.close()
        for owner in self.owners:
            owner.close()


def ids(*numbers: int) -> list[BlockId]:
    return list(map(BlockId, numbers))


def empty_pool(geometry: PoolGeometry = GEOMETRY) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.zeros((geometry.num_blocks, geometry.block_bytes), dtype=np.uint8)


def with_shard(lease: PeerLease, **changes: object) -> PeerLease:
    """Return the lease with another first shard; lease id, worker and epoch change everywhere."""
    common = {name: value for name, value in changes.items() if name in ("lease_id", "worker_id", "epoch")}
    first = replace(lease.shards[0], **changes)  # type: ignore[arg-type]
    return replace(lease, **common, shards=(first, *lease.shards[1:]))  # type: ignore[arg-type]


def with_address(
    lease: PeerLease, kv_address: str | None = None, needs_staging: bool | None = None,
    **transports: str | Path | None,
) -> PeerLease:  # fmt: skip
    """Return it with another address of its first shard, or other ones for transports; None: not offered."""
    known = lease.shards[0].address
    offered = {name: data for name, data in known.transports.items() if transports.get(name, "") is not None}
    offered |= {name: str(text).encode() for name, text in transports.items() if text is not None}
    address = ShardAddress(
        known.kv_address if kv_address is None else kv_address,
        known.needs_staging if needs_staging is None else needs_staging,
        offered,
    )
    return with_shard(lease, address=address)


def host_client(
    geometry: PoolGeometry, pool: Blocks, token: str = "", names: Sequence[str] = ("shm", "tcp")
) -> KvClient:  # fmt: skip
    """Make a client that fills a pool in host memory."""
    leases = LeaseClient(token)
    known: dict[str, Reader] = {"shm": ShmReader(pool, leases)}
    if HAS_TCP:
        from kvstore.transports.tcp.reader import TcpReader

        known["tcp"] = TcpReader(pool, leases)
    kind: type[KvClient] = from_wing("kvstore.transports.fallbacks.client:FallbackClient") or KvClient
    return kind(geometry, {name: known[name] for name in names if name in known})


def pull_of_one(lease: PeerLease, rank: int = 0) -> BlockPull:
    """Copy the lease's first block in the pool of a rank to block 0."""
    return BlockPull([SourcePart(lease.shards[rank])], [0], [BlockId(0)], time.monotonic() + 60.0)


def as_handle(lease: PeerLease) -> pb.KvHandle:
    """Return the handle that the lease's owner would have written."""
    shards = [pack_shard(each.geometry, each.address, each.block_ids, each.digests) for each in lease.shards]
    return pb.KvHandle(
        lease_id=lease.lease_id, worker_id=lease.worker_id, epoch=lease.epoch, num_tokens=lease.num_tokens,
        lease_seconds=lease.lease_seconds, shards=shards,
    )  # fmt: skip


def handle_to_hex(handle: pb.KvHandle) -> str:
    """Encode a handle for the standard output of an owner's process."""
    return handle.SerializeToString().hex()


def lease_from_hex(text: str) -> PeerLease:
    return open_handle(pb.KvHandle.FromString(bytes.fromhex(text)))


def num_descriptors_of(fd: int) -> int:
    """Return the number of this process' descriptors of the same file. Those left by other tests do not count."""
    wanted = os.stat(fd)
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, like the one that listed them
            found += os.path.samestat(os.stat(int(name)), wanted)
    return found


def shm_names() -> set[str]:
    """Return the names in /dev/shm except UCX's. Tests in other processes make some, too, and remove them soon."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("ucx_")}
