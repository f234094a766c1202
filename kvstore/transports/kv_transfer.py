"""Client and service of KvTransfer, by which workers use each other's leases.

Clients are threads of an engine process, with one channel per peer. The service runs in the owner's front, which
mirrors the leases of its engine process: both expire leases by the same clock, and the reader's digest check covers
the remaining race.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.errors import MiniInferError, TransferError, UnavailableError
from common.net.rpc import CHANNEL_OPTIONS, Context, abort_with, token_metadata
from kvstore.handle.handle import PeerLease
from kvstore.pool.leases import LeaseTable
from kvstore.types import BlockId, Epoch, LeaseId
from protos import kvstore_pb2, kvstore_pb2_grpc

MAX_CHANNELS = 64
CALL_SECONDS = 5.0


class LeaseClient:
    """Thread-safe channels to peers, by address; keeps the MAX_CHANNELS most recently used ones open."""

    def __init__(self, token: str = "") -> None:
        self._metadata = token_metadata(token)
        self._lock = threading.Lock()
        self._channels: OrderedDict[str, tuple[grpc.Channel, kvstore_pb2_grpc.KvTransferStub]] = OrderedDict()

    def renew(self, lease: PeerLease) -> bool:
        """Renew a lease; return False if it has ended. Raises UnavailableError, TransferError."""
        request = kvstore_pb2.LeaseRequest(
            lease_id=lease.lease_id, epoch=lease.epoch, lease_seconds=lease.lease_seconds
        )
        return bool(self.call(lease.kv_address, "Renew", request).held)

    def release(self, lease: PeerLease) -> bool:
        """Release a lease; return False if there is none. Raises UnavailableError, TransferError."""
        request = kvstore_pb2.LeaseRequest(lease_id=lease.lease_id, epoch=lease.epoch)
        return bool(self.call(lease.kv_address, "Release", request).held)

    def call(self, address: str, method: str, request: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a peer. Raises UnavailableError if it does not answer in time, TransferError for other failures."""
        try:
            return getattr(self._stub(address), method)(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            status: grpc.StatusCode = error.code()
            if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise UnavailableError(f"the peer does not answer ({status.name})") from error
            raise TransferError(f"the peer refused: {error.details()} ({status.name})") from error

    def _stub(self, address: str) -> kvstore_pb2_grpc.KvTransferStub:
        """Return the stub for `address`; opens the channel at the first use."""
        with self._lock:
            entry = self._channels.get(address)
            if entry is None:
                channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
                entry = self._channels[address] = (channel, kvstore_pb2_grpc.KvTransferStub(channel))
                if len(self._channels) > MAX_CHANNELS:
                    _, (oldest, _stub) = self._channels.popitem(last=False)
                    oldest.close()
            self._channels.move_to_end(address)
            return entry[1]

    def close(self) -> None:
        with self._lock:
            for channel, _ in self._channels.values():
                channel.close()
            self._channels.clear()


@dataclass(eq=False, kw_only=True)
class KvTransferService(kvstore_pb2_grpc.KvTransferServicer):  # type: ignore[misc]
    """The KvTransfer service; `server.add(add_KvTransferServicer_to_server, service, name)` adds it to a server.

    `on_renew` and `on_release` notify the engine, after `leases`, the front's mirror, has been updated here.
    """

    leases: LeaseTable
    on_renew: Callable[[LeaseId, Epoch, float], None]
    on_release: Callable[[LeaseId, Epoch], None]
    stage: Callable[[LeaseId, int], Awaitable[list[BlockId]]] | None = None  # for pools in GPU memory, see `rows`
    descriptions: Mapping[str, bytes] = field(default_factory=dict)  # by transport

    async def Renew(self, request: kvstore_pb2.LeaseRequest, context: Context) -> kvstore_pb2.LeaseReply:
        lease_id, epoch = LeaseId(request.lease_id), Epoch(request.epoch)
        held = self.leases.renew(lease_id, epoch, time.monotonic(), request.lease_seconds)
        if held:
            self.on_renew(lease_id, epoch, request.lease_seconds)
        return kvstore_pb2.LeaseReply(held=held)

    async def Release(self, request: kvstore_pb2.LeaseRequest, context: Context) -> kvstore_pb2.LeaseReply:
        lease_id, epoch = LeaseId(request.lease_id), Epoch(request.epoch)
        held = self.leases.release(lease_id, epoch) is not None
        if held:
            self.on_release(lease_id, epoch)
        return kvstore_pb2.LeaseReply(held=held)

    async def Stage(self, request: kvstore_pb2.StageRequest, context: Context) -> kvstore_pb2.StageReply:
        rows: Sequence[BlockId] = ()
        try:
            self.resolve(request, [request.first])
            rows = await self.rows(request, request.first)
        except MiniInferError as error:
            await abort_with(context, error)
        return kvstore_pb2.StageReply(rows=rows)

    async def DescribeTransport(
        self, request: kvstore_pb2.DescribeTransportRequest, context: Context
    ) -> kvstore_pb2.DescribeTransportReply:
        description = self.descriptions.get(request.transport)
        if description is None or request.epoch != self.leases.epoch:
            await abort_with(context, TransferError(f"this worker does not offer {request.transport[:64]!r}"))
        return kvstore_pb2.DescribeTransportReply(description=description)

    def close(self) -> None:
        """Stop servers of blocks that a subclass has started."""

    # -- for transports that add calls of their own --------------------------------------------------------------

    async def rows(self, request: kvstore_pb2.ReadRequest | kvstore_pb2.StageRequest, first: int) -> list[BlockId]:
        """Return the rows of host memory, the same on every rank, with the lease's blocks from `first` on.

        Raises TransferError if they cannot be copied there.
        """
        blocks = self.resolve(request, None)
        return blocks[first:] if self.stage is None else await self.stage(LeaseId(request.lease_id), first)

    def resolve(
        self, request: kvstore_pb2.ReadRequest | kvstore_pb2.StageRequest, positions: Sequence[int] | None
    ) -> list[BlockId]:
        """Return the lease's blocks at `positions` (None: all). Raises TransferError."""
        return self.leases.resolve(LeaseId(request.lease_id), Epoch(request.epoch), positions, time.monotonic())
