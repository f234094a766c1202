"""The KvTransfer service of one worker, in its front: leases, and what transports tell of themselves.

The front mirrors the leases of the engine process, which owns them. Both end leases by the same clock, and the
reader's digest check covers what is left of the race.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import MiniInferError, TransferError
from common.net.rpc import Context, abort_with
from kvstore.pool.leases import LeaseTable
from kvstore.types import BlockId, Epoch, LeaseId
from protos import kvstore_pb2, kvstore_pb2_grpc


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
