"""The owner's side of the `nccl` transport (protocol: `reader.py`): joins readers' communicators and sends blocks.

One thread per reader, in the engine process next to the step loop: a reader that stops delays no other. Everything in
a peer's message is checked before use, its token first.
"""

from __future__ import annotations

import hmac
import logging
import socket
import time
from typing import Any

from common.errors import TransferError
from common.logging import RateLimit
from common.net.hosts import check_bind
from kvstore.transports.nccl.connection import REPLY_SECONDS, Connection
from kvstore.transports.nccl.reader import JOIN_SECONDS, OWNER, NcclDevice, transfer_deadline
from kvstore.transports.tcp.tcp_server import TcpServer
from kvstore.transports.transport import LeaseHolder
from kvstore.types import Epoch, LeaseId

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())
MAX_HELLO_BYTES = 4096
MAX_REQUEST_BYTES = 1 << 20
MAX_READERS = 64
MAX_POSITIONS = 1 << 16
MAX_PIECE_BYTES = 1 << 28  # the owner may have to gather this much


class NcclServer:
    """Listens from the start, and serves from `serve` to `close`."""

    def __init__(self, host: str, token: str, worker_id: str, epoch: Epoch) -> None:
        """Raise ConfigError if there is no port, or an unprotected one."""
        check_bind(host, token)
        self._token = token.encode()
        self._worker_id = worker_id
        self._epoch = epoch
        self._ranks: list[tuple[NcclDevice, int]] = []  # with the bytes of a block
        self._leases: LeaseHolder
        self._server = TcpServer(host, 0, self._serve, MAX_READERS, "NCCL")
        self.port = self._server.port

    def add(self, device: NcclDevice, block_bytes: int) -> None:
        """Offer the pool of the next rank."""
        self._ranks.append((device, block_bytes))

    def serve(self, leases: LeaseHolder) -> None:
        """Accept readers."""
        self._leases = leases
        self._server.start()

    def close(self) -> None:
        """End all connections. A send in progress ends soon without help."""
        self._server.close()

    def _serve(self, sock: socket.socket) -> None:
        """Serve one reader, from its first message to its end."""
        try:
            self._serve_reader(Connection(sock))
        except TransferError as error:
            logger.info("a reader's communicator has ended: %s", error)

    def _serve_reader(self, connection: Connection) -> None:
        device, block_bytes = self._ranks[self._welcome(connection)]
        unique_id = connection.receive(MAX_HELLO_BYTES, REPLY_SECONDS)
        if not isinstance(unique_id, bytes) or len(unique_id) != 128:
            raise TransferError("no unique id")
        link = device.connect(unique_id, OWNER, time.monotonic() + JOIN_SECONDS)
        try:
            while True:
                request = connection.receive(MAX_REQUEST_BYTES, None)
                self._send(connection, device, link, request, block_bytes)
        finally:
            link.abort()

    def _welcome(self, connection: Connection) -> int:
        """Check a reader's first message and answer it; return the rank to read. Raises TransferError."""
        hello = connection.receive(MAX_HELLO_BYTES, REPLY_SECONDS)
        match hello:
            case [str() as token, str() as worker_id, int() as epoch, int() as rank, str() as gpu]:
                pass
            case _:
                raise TransferError("a malformed greeting")
        reason = ""
        if not hmac.compare_digest(token.encode(), self._token):
            reason = "cluster token missing or wrong"
        elif (worker_id, epoch) != (self._worker_id, self._epoch):
            reason = "this is another worker, or it has restarted (stale epoch)"
        elif not 0 <= rank < len(self._ranks):
            reason = f"rank {rank} of a worker of {len(self._ranks)}"
        elif gpu == self._ranks[rank][0].gpu:
            reason = "NCCL does not connect a GPU with itself"
        connection.send([reason])
        if reason:
            raise TransferError(reason)
        return rank

    def _send(self, connection: Connection, device: NcclDevice, link: Any, request: Any, block_bytes: int) -> None:
        """Answer one request. Raises TransferError for failures that end the communicator."""
        try:
            lease_id, positions, pieces = _checked(request, block_bytes)
            block_ids = self._leases.hold(lease_id, self._epoch, positions)
        except TransferError as error:
            connection.send([str(error)])
            return
        try:
            deadline = transfer_deadline(len(positions) * block_bytes)
            connection.send([""])
            device.send(link, block_ids, pieces, deadline, connection.check)
        finally:
            self._leases.let_go(lease_id)


def _checked(request: Any, block_bytes: int) -> tuple[LeaseId, list[int], list[int]]:
    """Return lease, positions and pieces of a request. Raises TransferError for any other message."""
    match request:
        case [str() as lease_id, list() as positions, list() as pieces]:
            pass
        case _:
            raise TransferError("a malformed request")
    if not all(type(number) is int for number in (*positions, *pieces)) or not 0 < len(positions) <= MAX_POSITIONS:
        raise TransferError("a malformed request")
    most = max(MAX_PIECE_BYTES // block_bytes, 1)
    if sum(pieces) != len(positions) or not 0 < min(pieces) <= max(pieces) <= most:
        raise TransferError("pieces that do not fit the positions")
    return LeaseId(lease_id), positions, pieces
