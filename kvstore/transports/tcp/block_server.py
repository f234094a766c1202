"""Sends blocks over plain TCP connections, straight from the descriptor of a pool's memory.

A reader asks the KvTransfer service, which checks token, lease and epoch, and gets a ticket and this server's port.
It sends the ticket on a connection and receives the bytes of its blocks in order, and nothing else. A ticket is valid
for one read; a connection serves any number of reads in sequence. Any violation ends the connection.

The kernel copies from the pool's pages to the socket (sendfile), with one thread per connection: Python copies
nothing.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import MiniInferError
from common.logging import RateLimit
from kvstore.transports.tcp.tcp_server import TcpServer
from kvstore.types import BlockId, runs_of

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

TICKET_BYTES = 16
TICKET_SECONDS = 30.0
MAX_TICKETS = 1 << 14
MAX_CONNECTIONS = 512
STALL_SECONDS = 10  # the longest time in which a reader accepts no data
MAX_SENT = 1 << 26  # between two checks of the lease


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Rows of a memfd. check: raises MiniInferError once they may no longer be read; called from any thread."""

    memory: int
    block_bytes: int
    rows: Sequence[BlockId]
    check: Callable[[], object]


class BlockServer:
    """Serves until `close`."""

    def __init__(self, host: str, port: int = 0) -> None:
        """host, port: see `TcpServer`. Raises ConfigError if it cannot listen."""
        self._lock = threading.Lock()
        self._tickets: dict[bytes, tuple[BlockRead, float]] = {}  # in order of expiry
        self._server = TcpServer(host, port, self._serve, MAX_CONNECTIONS, "KV blocks")
        self._server.start()

    @property
    def port(self) -> int:
        return self._server.port

    def offer(self, memory: int, block_bytes: int, rows: Sequence[BlockId], check: Callable[[], object]) -> bytes:
        """Return a ticket for one `BlockRead`."""
        read = BlockRead(memory, block_bytes, rows, check)
        ticket, now = secrets.token_bytes(TICKET_BYTES), time.monotonic()
        with self._lock:
            while self._tickets:
                oldest = next(iter(self._tickets))
                if self._tickets[oldest][1] > now and len(self._tickets) < MAX_TICKETS:
                    break
                del self._tickets[oldest]
            self._tickets[ticket] = read, now + TICKET_SECONDS
        return ticket

    def close(self) -> None:
        """Stop serving; reads in progress end."""
        self._server.close()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a reader's host may be gone
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STALL_SECONDS, 0))
        try:
            while (read := self._take(connection.recv(TICKET_BYTES, socket.MSG_WAITALL))) is not None:
                _send(connection, read)
        except (OSError, MiniInferError) as error:
            logger.info("a read of KV blocks ended early: %s", error)

    def _take(self, ticket: bytes) -> BlockRead | None:
        with self._lock:
            read, end = self._tickets.pop(ticket, (None, 0.0))
        return read if time.monotonic() < end else None


def _send(connection: socket.socket, read: BlockRead) -> None:
    """Send the rows. Raises OSError if the reader is gone, or MiniInferError."""
    for _, row, count in runs_of(read.rows):
        at, end = row * read.block_bytes, (row + count) * read.block_bytes
        while at < end:
            read.check()
            sent = os.sendfile(connection.fileno(), read.memory, at, min(end - at, MAX_SENT))
            if not sent:
                raise OSError("the pool's memory has ended")
            at += sent
