"""The KvTransfer service of a worker that sends blocks by TCP: grants tickets for reads."""

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
    """Read-only pool of another process of this host: the memfd `memory`, with rows of `block_bytes`."""

    def __init__(self, socket_path: str) -> None:
        """Ask the owner's DescriptorServer. Raises UnavailableError, TransferError, ConfigError."""
        info, self.memory = fetch_pool(socket_path, FETCH_SECONDS)
        self.block_bytes = info.geometry.block_bytes
        try:
            check_sealed(self.memory, info.geometry.pool_bytes)
        except BaseException:  # Ctrl-C and cancelled tasks, too: nothing may stay open
            self.close()
            raise

    def close(self) -> None:
        os.close(self.memory)


@dataclass(eq=False, kw_only=True)
class TcpTransferService(KvTransferService):
    """Grants reads. The lease is checked again while its blocks are sent."""

    sender: BlockServer  # owned by the service
    pools: Sequence[PoolView]  # by rank, since a lease names the same blocks in each; the caller closes them

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
