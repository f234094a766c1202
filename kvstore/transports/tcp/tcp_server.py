"""A TCP server with one accepting thread and one thread per connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from common.errors import ConfigError
from kvstore.transports.sockets import accepted


class TcpServer:
    """Calls `serve` with each connection in its own thread, and closes the connection afterwards."""

    def __init__(
        self, host: str, port: int, serve: Callable[[socket.socket], None], max_connections: int, purpose: str
    ) -> None:
        """Listen. Raises ConfigError if that is not possible.

        host: IPv6 with or without brackets. port: 0: any free one. max_connections: connections beyond are closed at
        once.
        purpose: shown in messages.
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
        """Start accepting connections."""
        threading.Thread(target=self._accept, name=self._purpose, daemon=True).start()

    def close(self) -> None:
        """Stop accepting, and end all connections; their threads close them."""
        with self._lock:
            self._closing = True
            connections = [*self._connections, self._listener]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the connection's thread
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
