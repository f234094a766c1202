"""A DescriptorServer whose clients stay connected, so that they notice when the pool's owner is gone."""

from __future__ import annotations

import socket
from collections import deque
from pathlib import Path

from kvstore.handle.handle import PoolInfo
from kvstore.transports.shared_memory import DescriptorServer, receive_pool
from kvstore.transports.sockets import connect_unix, has_gone

MAX_HELD = 256


class HeldServer(DescriptorServer):
    """Keeps connections open until the server closes or the client leaves; beyond MAX_HELD the oldest is closed."""

    def __init__(self, socket_path: Path, info: PoolInfo, fd: int) -> None:
        self._held: deque[socket.socket] = deque()
        super().__init__(socket_path, info, fd)

    def close(self) -> None:
        super().close()
        while self._held:
            self._held.popleft().close()

    def served(self, client: socket.socket) -> None:
        for other in list(self._held):
            if has_gone(other):
                self._held.remove(other)
                other.close()
        client.setblocking(False)  # with a timeout, `has_gone` would wait for it and report the client as gone
        self._held.append(client)
        if len(self._held) > MAX_HELD:
            self._held.popleft().close()


def fetch_held(socket_path: str, timeout_seconds: float) -> tuple[PoolInfo, int, socket.socket]:
    """Like `fetch_pool`, but also return the connection, which ends with the server; the caller closes it."""
    sock = connect_unix(socket_path, timeout_seconds)
    try:
        return *receive_pool(sock), sock
    except BaseException:  # Ctrl-C and cancelled tasks, too: nothing may stay open
        sock.close()
        raise
