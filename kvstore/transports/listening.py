"""Servers of connections: a thread that accepts, and for TCP a thread for each connection."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

from common.errors import ConfigError
from common.logging import RateLimit

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

RETRY_SECONDS = 0.1


class TcpServer:
    """Calls `serve` with each connection, in a thread of its own, and closes it afterwards."""

    def __init__(
        self, host: str, port: int, serve: Callable[[socket.socket], None], max_connections: int, purpose: str
    ) -> None:
        """Listen. Raises ConfigError when that cannot be.

        host: IPv6 in brackets or without. port: 0, any free one. max_connections: those beyond are closed at once.
        purpose: what it is for, in messages.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host.strip("[]"), port), family=family)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} for {purpose}: {error.strerror}") from error
        self.port: int = self._listener.getsockname()[1]
        self._serve = serve
        self._max_connections = max_connections
        self._purpose = purpose
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closing = False

    def start(self) -> None:
        """Accept connections from now on."""
        threading.Thread(target=self._accept, name=self._purpose, daemon=True).start()

    def close(self) -> None:
        """Stop accepting, and end all connections: their threads close them."""
        with self._lock:
            self._closing = True
            connections = [*self._connections, self._listener]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes its thread
        self._listener.close()

    def _accept(self) -> None:
        for connection in accepted(self._listener, lambda: self._closing, self._purpose):
            with self._lock:
                is_welcome = not self._closing and len(self._connections) < self._max_connections
                if is_welcome:
                    self._connections.add(connection)
            if is_welcome:
                threading.Thread(target=self._run, args=[connection], name=self._purpose, daemon=True).start()
            else:
                connection.close()

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()


def accepted(listener: socket.socket, is_closing: Callable[[], bool], purpose: str) -> Iterator[socket.socket]:
    """Yield connections as they come, until `listener` fails while it is being closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if is_closing():
                return
            # Out of descriptors, most likely: a moment later there may be some again.
            logger.warning("cannot accept a connection for %s: %s", purpose, error.strerror)
            time.sleep(RETRY_SECONDS)
            continue
        yield connection
