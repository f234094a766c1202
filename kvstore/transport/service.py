"""The KvTransfer service of one worker, in its front: reads of leased blocks by TCP, and leases.

The front maps the pool of each rank read-only and mirrors its leases; the engine owns both. A chunk is copied first
and the lease looked at once more before the chunk is sent, so nothing leaves under a lease that has ended here. Both
processes end leases by the same clock, and the reader's digest check covers what is left of the race.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import numpy.typing as npt

from common.errors import InvalidRequestError, MiniInferError, TransferError
from common.rpc import Context, abort_with
from kvstore.pool.leases import LeaseTable
from kvstore.transport.descriptor_server import fetch_pool
from kvstore.transport.shared_memory import blocks_over, map_fd
from kvstore.transport.staging import StagingTable
from kvstore.types import BlockId, Epoch, LeaseId
from protos import kvstore_pb2, kvstore_pb2_grpc

CHUNK_BYTES = 1 << 20
MAX_POSITIONS = 1 << 16
FETCH_SECONDS = 5.0
Blocks = npt.NDArray[np.uint8]

OnRenew = Callable[[LeaseId, Epoch, float], None]
OnRelease = Callable[[LeaseId, Epoch], None]


class PoolView:
    """A pool of another process of this host, read-only: `blocks` is uint8 [num_blocks, block_bytes].

    With `staging` it is an area in front of GPU memory, to whose rows the blocks of a lease are copied on demand.
    """

    def __init__(self, socket_path: str, staging: StagingTable | None = None) -> None:
        """Ask the owner's DescriptorServer. Raises UnavailableError, TransferError, ConfigError."""
        self.staging = staging
        info, fd = fetch_pool(socket_path, FETCH_SECONDS)
        try:
            mapping = map_fd(fd, info.geometry.pool_bytes, writable=False)
        finally:
            os.close(fd)
        self.blocks: Blocks = blocks_over(mapping, info.geometry.num_blocks, info.geometry.block_bytes)


class KvTransferService(kvstore_pb2_grpc.KvTransferServicer):  # type: ignore[misc]
    """Add it with `server.add(add_KvTransferServicer_to_server, service, SERVICE_NAME)`.

    `on_renew` and `on_release` tell the engine; the mirror is changed here before they are called.
    """

    def __init__(
        self,
        pools: Sequence[PoolView],
        leases: LeaseTable,
        on_renew: OnRenew,
        on_release: OnRelease,
        nixl_memory: bytes = b"",
    ) -> None:
        """`pools` by rank: a lease names the same blocks in each of them. nixl_memory: see `NixlAgent.describe`."""
        self._pools = pools
        self._leases = leases
        self._on_renew = on_renew
        self._on_release = on_release
        self._nixl_memory = nixl_memory

    async def Renew(self, request: kvstore_pb2.LeaseRequest, context: Context) -> kvstore_pb2.LeaseReply:
        lease_id, epoch = LeaseId(request.lease_id), Epoch(request.epoch)
        held = self._leases.renew(lease_id, epoch, time.monotonic(), request.lease_seconds)
        if held:
            self._on_renew(lease_id, epoch, request.lease_seconds)
        return kvstore_pb2.LeaseReply(held=held)

    async def Release(self, request: kvstore_pb2.LeaseRequest, context: Context) -> kvstore_pb2.LeaseReply:
        lease_id, epoch = LeaseId(request.lease_id), Epoch(request.epoch)
        held = self._leases.release(lease_id, epoch) is not None
        if held:
            self._on_release(lease_id, epoch)
        return kvstore_pb2.LeaseReply(held=held)

    async def Stage(self, request: kvstore_pb2.StageRequest, context: Context) -> kvstore_pb2.StageReply:
        rows: Sequence[BlockId] = ()
        try:
            self._resolve(request, [request.first])
            rows = await self._rows(request, self._pool(request.rank), request.first)
        except MiniInferError as error:
            await abort_with(context, error)
        return kvstore_pb2.StageReply(rows=rows)

    async def Read(self, request: kvstore_pb2.ReadRequest, context: Context) -> AsyncIterator[kvstore_pb2.BlockChunk]:
        try:
            if len(request.positions) > MAX_POSITIONS:
                raise InvalidRequestError(f"at most {MAX_POSITIONS} blocks in one read", "positions")
            pool = self._pool(request.rank)
            self._resolve(request, request.positions)
            first = min(request.positions, default=0)
            rows = await self._rows(request, pool, first)
            for index, position in enumerate(request.positions):
                for chunk in block_chunks(index, pool.blocks[rows[position - first]]):
                    self._resolve(request, [position])  # after the copy
                    yield chunk
        except MiniInferError as error:
            await abort_with(context, error)

    async def DescribeMemory(self, request: kvstore_pb2.MemoryRequest, context: Context) -> kvstore_pb2.MemoryReply:
        if not self._nixl_memory or request.epoch != self._leases.epoch:
            await abort_with(context, TransferError("this worker has not registered its memory for NIXL"))
        return kvstore_pb2.MemoryReply(description=self._nixl_memory)

    def _pool(self, rank: int) -> PoolView:
        """Pool of a rank. Raises InvalidRequestError."""
        if rank >= len(self._pools):
            raise InvalidRequestError(f"rank {rank} of a worker of {len(self._pools)}", "rank")
        return self._pools[rank]

    async def _rows(
        self, request: kvstore_pb2.ReadRequest | kvstore_pb2.StageRequest, pool: PoolView, first: int
    ) -> list[BlockId]:
        """Rows of `pool` with the lease's blocks from `first` on. Raises TransferError when they cannot get there."""
        blocks = self._resolve(request, None)
        return blocks[first:] if pool.staging is None else await pool.staging.rows(LeaseId(request.lease_id), first)

    def _resolve(
        self, request: kvstore_pb2.ReadRequest | kvstore_pb2.StageRequest, positions: Sequence[int] | None
    ) -> list[BlockId]:
        return self._leases.resolve(LeaseId(request.lease_id), Epoch(request.epoch), positions, time.monotonic())


def block_chunks(index: int, block: Blocks) -> list[kvstore_pb2.BlockChunk]:
    """Copy one block into messages of at most CHUNK_BYTES of data."""
    return [
        kvstore_pb2.BlockChunk(position=index, offset=offset, data=block[offset : offset + CHUNK_BYTES].tobytes())
        for offset in range(0, len(block), CHUNK_BYTES)
    ]
