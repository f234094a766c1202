"""Hands out descriptors of a pool over a Unix socket, from a small thread of the pool's owner.

A client that can open the socket (a process of the owner's user) gets one frame, {"pool": PoolInfo}, with one
descriptor. Then the connection ends. The server reads nothing, so there is nothing to send it; one client is served
at a time, and one that does not read is dropped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

from common.errors import TransferError
from kvstore.handle.pool_info import PoolInfo, info_from_wire, info_to_wire
from kvstore.transports.sockets import UnixListener, accepted, connect_unix, recv_frame, send_frame

MAX_INFO_BYTES = 1 << 16
SEND_TIMEOUT_SECONDS = 1.0


class DescriptorServer:
    """Serves `fd`, which becomes the server's, until `close`.

    Raises ConfigError when the socket path cannot be used.
    """

    def __init__(self, socket_path: Path, info: PoolInfo, fd: int) -> None:
        self.socket_path = socket_path
        self._message = {"pool": info_to_wire(info)}
        self._fd = fd
        try:
            self._listener = UnixListener(socket_path)
        except BaseException:  # Ctrl-C and cancelled tasks, too: what was opened must not stay open
            os.close(self._fd)
            raise
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="kv-descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and remove the socket. Descriptors that were handed out stay valid."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.sock.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join()
        self._listener.close()
        os.close(self._fd)

    def _serve(self) -> None:
        for client in accepted(self._listener.sock, lambda: self._closing, "KV descriptors"):
            try:
                client.settimeout(SEND_TIMEOUT_SECONDS)
                send_frame(client, self._message, [self._fd])
            except OSError:  # the client went away, or does not read
                client.close()
            else:
                self.served(client)

    def served(self, client: socket.socket) -> None:
        """End a connection on which everything was sent."""
        client.close()


def fetch_pool(socket_path: str, timeout_seconds: float) -> tuple[PoolInfo, int]:
    """Ask a DescriptorServer. The caller closes the descriptor.

    Raises UnavailableError (no server), TransferError or HandshakeError (not such a server).
    """
    with connect_unix(socket_path, timeout_seconds) as sock:
        return receive_pool(sock)


def receive_pool(sock: socket.socket) -> tuple[PoolInfo, int]:
    """Receive what a DescriptorServer sends, as `fetch_pool`."""
    fds: list[int] = []
    try:
        message, fds = recv_frame(sock, MAX_INFO_BYTES, max_fds=1)
        if not isinstance(message, dict) or "pool" not in message or len(fds) != 1:
            raise TransferError("the Unix socket does not hand out a KV pool")
        return info_from_wire(message["pool"]), fds[0]
    except BaseException:  # Ctrl-C and cancelled tasks, too: what was opened must not stay open
        for fd in fds:
            os.close(fd)
        raise
