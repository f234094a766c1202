"""A port for Prometheus and HTTP health checks, in a process without its own HTTP server.

`/readyz` answers as a gRPC health check would, at far less cost for the caller. All scrapers get the same text,
whatever they accept: in OpenMetrics, prometheus_client writes `vllm:` as `vllm_`, so dashboards would find other
names than in the documentation.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from common.errors import ConfigError
from common.metrics import CONTENT_TYPE
from common.net.hosts import socket_family

IDLE_SECONDS = 10.0  # after which a connection without a request is closed

logger = logging.getLogger(__name__)


class _Handler(BaseHTTPRequestHandler):
    timeout = IDLE_SECONDS
    server: _Server

    def do_GET(self) -> None:
        is_ready = self.server.is_ready
        match self.path.partition("?")[0]:
            case "/metrics" | "/":
                try:
                    self._answer(HTTPStatus.OK, self.server.render_metrics())
                except TimeoutError:
                    self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"too busy\n")
            case "/readyz" if is_ready is not None:
                if is_ready():
                    self._answer(HTTPStatus.OK, b"ready\n")
                else:
                    self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"not ready\n")
            case _:
                self._answer(HTTPStatus.NOT_FOUND, b"not here\n")

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: scrapes are not worth a line each."""


class _Server(ThreadingHTTPServer):
    def __init__(
        self, host: str, port: int, render_metrics: Callable[[], bytes], is_ready: Callable[[], bool] | None
    ) -> None:
        self.address_family = socket_family(host)
        self.render_metrics = render_metrics
        self.is_ready = is_ready
        super().__init__((host.strip("[]"), port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that left before its answer
            logger.exception("a scrape failed")


def serve_scrapes(
    render: Callable[[], bytes], host: str, port: int, is_ready: Callable[[], bool] | None = None
) -> Callable[[], None]:
    """Answer GET /metrics on threads with the result of `render`, or with 503 if it raises TimeoutError.

    With `is_ready` also answer /readyz. Returns a function that closes the port. Raises ConfigError if it is taken.
    """
    try:
        server = _Server(host, port, render, is_ready)
    except OSError as error:
        raise ConfigError(f"port {port} is taken or not allowed: choose another with --metrics-port") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
