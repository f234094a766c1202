"""KvTransfer, the service by which workers use each other's leases: the caller's side and the owner's.

Callers are threads of an engine process, with a channel for each peer. The service is in the owner's front, which
mirrors the leases of its engine process: both end leases by the same clock, and the reader's digest check covers what
is left of the race.
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
    """Channels to peers by address, for any thread; beyond MAX_CHANNELS the least recently used one is closed."""

    def __init__(self, token: str = "") -> None:
        self._metadata = token_metadata(token)
        self._lock = threading.Lock()
        self._channels: OrderedDict[str, tuple[grpc.Channel, kvstore_pb2_grpc.KvTransferStub]] = OrderedDict()

    def renew(self, lease: PeerLease) -> bool:
        """Renew a lease; False when it has ended. Raises UnavailableError."""
        request = kvstore_pb2.LeaseRequest(
            lease_id=lease.lease_id, epoch=lease.epoch, lease_seconds=lease.lease_seconds
        )
        return bool(self.call(lease.kv_address, "Renew", request).held)

    def release(self, lease: PeerLease) -> bool:
        """Release a lease; False when there was none. Raises UnavailableError."""
        request = kvstore_pb2.LeaseRequest(lease_id=lease.lease_id, epoch=lease.epoch)
        return bool(self.call(lease.kv_address, "Release", request).held)

    def call(self, address: str, method: str, request: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a peer. Raises UnavailableError when it cannot be reached in time, else TransferError."""
        try:
            return getattr(self._stub(address), method)(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            status: grpc.StatusCode = error.code()
            if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise UnavailableError(f"the peer does not answer ({status.name})") from error
            raise TransferError(f"the peer refused: {error.details()} ({status.name})") from error

    def _stub(self, address: str) -> kvstore_pb2_grpc.KvTransferStub:
        """The stub for `address`, connected when it is first used."""
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
    """Add it with `server.add(add_KvTransferServicer_to_server, service, name)`.

    `on_renew` and `on_release` tell the engine; the mirror is changed here before they are called.
    """

    leases: LeaseTable
    on_renew: Callable[[LeaseId, Epoch, float], None]
    on_release: Callable[[LeaseId, Epoch], None]
    stage: Callable[[LeaseId, int], Awaitable[list[BlockId]]] | None = None  # for pools in GPU memory, see `rows`
    descriptions: Mapping[str, bytes] = field(default_factory=dict)  # of transports, by name

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
        """End what serves blocks apart from these calls."""

    # -- what transports use that add calls of their own ---------------------------------------------------------

    async def rows(self, request: kvstore_pb2.ReadRequest | kvstore_pb2.StageRequest, first: int) -> list[BlockId]:
        """Rows of host memory, on every rank, with the lease's blocks from `first` on.

        Raises TransferError when they cannot get there.
        """
        blocks = self.resolve(request, None)
        return blocks[first:] if self.stage is None else await self.stage(LeaseId(request.lease_id), first)

    def resolve(
        self, request: kvstore_pb2.ReadRequest | kvstore_pb2.StageRequest, positions: Sequence[int] | None
    ) -> list[BlockId]:
        """The lease's blocks at `positions` (None: all). Raises TransferError."""
        return self.leases.resolve(LeaseId(request.lease_id), Epoch(request.epoch), positions, time.monotonic())
