"""The TCP connection that goes with a communicator: the reader's requests, the owner's answers, each side's end."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Any

from common.errors import TransferError
from kvstore.transports.sockets import recv_frame, send_frame

REPLY_SECONDS = 2.0
MAX_REPLY_BYTES = 4096


class Connection:
    """Either side of a pair's TCP connection. Raises TransferError for every failure."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._poll = select.poll()  # a socket with a timeout would wait for data, whatever its flags
        self._poll.register(sock, select.POLLIN)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, message: Any) -> None:
        try:
            send_frame(self.sock, message)
        except OSError as error:
            raise TransferError(f"the connection failed: {error.strerror or error}") from error

    def receive(self, max_bytes: int, seconds: float | None) -> Any:
        """Return the next message. seconds: limit between its parts; None: no limit."""
        self.sock.settimeout(seconds)
        message, _ = recv_frame(self.sock, max_bytes)
        self.sock.settimeout(REPLY_SECONDS)
        return message

    def ask(self, message: Any) -> None:
        """Send a message to the owner. Raises RefusedError with the reason unless it is accepted."""
        self.send(message)
        reply = self.receive(MAX_REPLY_BYTES, REPLY_SECONDS)
        match reply:
            case [""]:
                return
            case [str() as reason]:
                raise RefusedError(f"the peer refused: {reason}")
        raise TransferError("the peer's answer is malformed")

    def check(self) -> None:
        """Raise TransferError if the other side has ended the connection."""
        try:
            if not self._poll.poll(0):
                return
            data = self.sock.recv(1, socket.MSG_PEEK)
        except OSError as error:
            raise TransferError(f"the connection failed: {error.strerror or error}") from error
        if not data:
            raise TransferError("the peer is gone")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class RefusedError(TransferError):
    """The owner has refused the request. The communicator stays usable."""
