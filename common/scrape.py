"""A port for Prometheus, in a process that has no HTTP server of its own.

Every scraper gets the same text, whatever it says it accepts: in OpenMetrics, prometheus_client writes `vllm:` as
`vllm_`, and dashboards would find other names than in the documentation.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from common.errors import ConfigError
from common.metrics import CONTENT_TYPE

IDLE_SECONDS = 10.0  # a connection that asks for nothing is closed


def serve_scrapes(render: Callable[[], bytes], host: str, port: int) -> Callable[[], None]:
    """Answer GET /metrics on threads, with what `render` returns there; after a TimeoutError of its with 503.

    Returns what ends it. Raises ConfigError when the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_SECONDS

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/metrics", "/"):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                body = render()
            except TimeoutError:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not worth a line each."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} is taken or not allowed: choose another with --metrics-port") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
