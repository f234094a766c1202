"""The KvTransfer service of one worker, in its front: leases, and tickets to read their blocks by TCP.

The front holds a read-only descriptor of each rank's pool and mirrors its leases; the engine owns both. The lease is
looked at again while blocks are sent. Both processes end leases by the same clock, and the reader's digest check
covers what is left of the race.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from common.errors import InvalidRequestError, MiniInferError, TransferError
from common.net.rpc import Context, abort_with
from kvstore.pool.leases import LeaseTable
from kvstore.transports.descriptor_server import fetch_pool
from kvstore.transports.shared_memory import check_sealed
from kvstore.transports.staging import StagingTable
from kvstore.types import BlockId, Epoch, LeaseId
from protos import kvstore_pb2, kvstore_pb2_grpc

MAX_POSITIONS = 1 << 16
FETCH_SECONDS = 5.0


class BlockSender(Protocol):
    """Sends blocks over connections to `port` (`kvstore/transports/tcp`)."""

    @property
    def port(self) -> int: ...

    def offer(self, memory: int, block_bytes: int, rows: Sequence[BlockId], check: Callable[[], object]) -> bytes:
        """A ticket for one read of rows of a memfd, while `check` does not raise MiniInferError."""
        ...

    def close(self) -> None: ...


OnRenew = Callable[[LeaseId, Epoch, float], None]
OnRelease = Callable[[LeaseId, Epoch], None]


class PoolView:
    """A pool of another process of this host, read-only: the memfd `memory`, of rows of `block_bytes`.

    With `staging` it is an area in front of GPU memory, to whose rows the blocks of a lease are copied on demand.
    """

    def __init__(self, socket_path: str, staging: StagingTable | None = None) -> None:
        """Ask the owner's DescriptorServer. Raises UnavailableError, TransferError, ConfigError."""
        self.staging = staging
        info, self.memory = fetch_pool(socket_path, FETCH_SECONDS)
        self.block_bytes = info.geometry.block_bytes
        try:
            check_sealed(self.memory, info.geometry.pool_bytes)
        except BaseException:  # Ctrl-C and cancelled tasks, too: what was opened must not stay open
            self.close()
            raise

    def close(self) -> None:
        os.close(self.memory)


class KvTransferService(kvstore_pb2_grpc.KvTransferServicer):  # type: ignore[misc]
    """Add it with `server.add(add_KvTransferServicer_to_server, service, name)`.

    `on_renew` and `on_release` tell the engine; the mirror is changed here before they are called.
    """

    def __init__(
        self,
        pools: Sequence[PoolView],
        sender: BlockSender | None,
        leases: LeaseTable,
        on_renew: OnRenew,
        on_release: OnRelease,
        descriptions: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """`pools` by rank: a lease names the same blocks in each of them. descriptions: of transports, by name.

        Pools and sender stay the caller's to close. sender: None: nothing is read by TCP.
        """
        self._pools = pools
        self._sender = sender
        self._leases = leases
        self._on_renew = on_renew
        self._on_release = on_release
        self._descriptions = descriptions

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

    async def Read(self, request: kvstore_pb2.ReadRequest, context: Context) -> kvstore_pb2.ReadReply:
        reply = kvstore_pb2.ReadReply()
        try:
            if self._sender is None:
                raise TransferError("this worker does not send KV by tcp")
            if len(request.positions) > MAX_POSITIONS:
                raise InvalidRequestError(f"at most {MAX_POSITIONS} blocks in one read", "positions")
            pool = self._pool(request.rank)
            self._resolve(request, request.positions)
            first = min(request.positions, default=0)
            rows = await self._rows(request, pool, first)
            wanted = [rows[position - first] for position in request.positions]
            ticket = self._sender.offer(pool.memory, pool.block_bytes, wanted, lambda: self._resolve(request, ()))
            reply = kvstore_pb2.ReadReply(ticket=ticket, port=self._sender.port)
        except MiniInferError as error:
            await abort_with(context, error)
        return reply

    async def DescribeTransport(
        self, request: kvstore_pb2.DescribeTransportRequest, context: Context
    ) -> kvstore_pb2.DescribeTransportReply:
        description = self._descriptions.get(request.transport)
        if description is None or request.epoch != self._leases.epoch:
            await abort_with(context, TransferError(f"this worker does not offer {request.transport[:64]!r}"))
        return kvstore_pb2.DescribeTransportReply(description=description)

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
