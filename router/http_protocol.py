"""uvicorn's httptools protocol with bounds on what comes before a request is complete, and errors as JSON.

The parser itself has no limit on headers: without one, a client could make the router hold any amount of them.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.errors import HttpError, error_body
from router.middleware import MAX_HEADER_BYTES, MAX_HEADERS

HEADER_TIMEOUT_SECONDS = 10.0
LINGER_SECONDS = 1.0
CHUNK_WRITER = "router.chunk_writer"  # in the scope of a request
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class ChunkWriter:
    """Writes chunks of an answer that has begun, in chunked encoding, past the layers of ASGI and without waiting."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """False while the client is behind by the transport's buffer, when it has gone, and before the headers."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding and not (cycle.flow.write_paused or cycle.disconnected))

    def write(self, body: bytes) -> None:
        """One chunk, not empty. Only while `is_ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _num_header_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None
    _is_refused = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = 0
        self._header_timer = self.loop.call_later(
            HEADER_TIMEOUT_SECONDS, self._refuse, 408, "the headers did not arrive in time"
        )

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse(431, "too many headers")

    def on_headers_complete(self) -> None:
        self._stop_timer()
        if not self._is_refused:
            super().on_headers_complete()
            self.scope[CHUNK_WRITER] = ChunkWriter(self.cycle)  # type: ignore[literal-required]

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._header_timer is not None:
            self._count(len(data))  # all of it belongs to headers that have not ended yet

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP request")

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "too long headers")

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer, then drop what the client still sends: closing at once would reset the connection under the
        answer, and the client would never see it."""
        self._stop_timer()
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        body = error_body(HttpError(status, message))
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, _REASONS[status], len(body)) + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
