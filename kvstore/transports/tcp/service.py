"""The KvTransfer service of a worker that sends blocks by TCP: tickets for reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import InvalidRequestError, MiniInferError
from common.net.rpc import Context, abort_with
from kvstore.transports.kv_transfer import KvTransferService
from kvstore.transports.shared_memory import check_sealed, fetch_pool
from kvstore.transports.tcp.block_server import BlockServer
from protos import kvstore_pb2

MAX_POSITIONS = 1 << 16
FETCH_SECONDS = 5.0


class PoolView:
    """A pool of another process of this host, read-only: the memfd `memory`, of rows of `block_bytes`."""

    def __init__(self, socket_path: str) -> None:
        """Ask the owner's DescriptorServer. Raises UnavailableError, TransferError, ConfigError."""
        info, self.memory = fetch_pool(socket_path, FETCH_SECONDS)
        self.block_bytes = info.geometry.block_bytes
        try:
            check_sealed(self.memory, info.geometry.pool_bytes)
        except BaseException:  # Ctrl-C and cancelled tasks, too: what was opened must not stay open
            self.close()
            raise

    def close(self) -> None:
        os.close(self.memory)


@dataclass(eq=False, kw_only=True)
class TcpTransferService(KvTransferService):
    """Grants reads. The lease is looked at again while their blocks are sent."""

    sender: BlockServer  # becomes the service's
    pools: Sequence[PoolView]  # by rank: a lease names the same blocks in each of them; the caller's to close

    async def Read(self, request: kvstore_pb2.ReadRequest, context: Context) -> kvstore_pb2.ReadReply:
        reply = kvstore_pb2.ReadReply()
        try:
            if len(request.positions) > MAX_POSITIONS:
                raise InvalidRequestError(f"at most {MAX_POSITIONS} blocks in one read", "positions")
            if request.rank >= len(self.pools):
                raise InvalidRequestError(f"rank {request.rank} of a worker of {len(self.pools)}", "rank")
            pool = self.pools[request.rank]
            self.resolve(request, request.positions)
            first = min(request.positions, default=0)
            rows = await self.rows(request, first)
            wanted = [rows[position - first] for position in request.positions]
            ticket = self.sender.offer(pool.memory, pool.block_bytes, wanted, lambda: self.resolve(request, ()))
            reply = kvstore_pb2.ReadReply(ticket=ticket, port=self.sender.port)
        except MiniInferError as error:
            await abort_with(context, error)
        return reply

    def close(self) -> None:
        self.sender.close()
