"""uvicorn's httptools protocol with bounds on connections, on headers and on clients that do not read.

The parser itself has no limit on headers: without one, a client could make the router hold any amount of them. What
is refused is refused with an error in JSON. Beyond the limit of connections a few more are served: health checks
are answered on them, so that a full router is not taken for a dead one, and everything else gets 503.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from common.errors import MiniInferError, UnavailableError
from router.config import HttpConfig
from router.errors import HttpError, error_body, error_headers, status_of
from router.middleware import MAX_HEADER_BYTES, MAX_HEADERS, OPEN_PATHS

logger = logging.getLogger(__name__)
HEADER_TIMEOUT_SECONDS = 10.0
NUM_SPARE_CONNECTIONS = 64  # over the limit: for health checks, and to say 503; more are closed at once
SPARE_SECONDS = 1.0  # that such a connection may take to ask
LINGER_SECONDS = 1.0
CHUNK_WRITER = "router.chunk_writer"  # in the scope of a request


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
    """One connection. `limits` belong to the class: uvicorn makes the instances, see `bounded_protocol`."""

    limits = HttpConfig()
    _in_headers = True
    _num_header_bytes = 0
    _timer: asyncio.TimerHandle | None = None  # until the headers are complete
    _stall_timer: asyncio.TimerHandle | None = None  # while the client does not read
    _is_spare = False
    _is_refused = False

    # -- connection --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_over = len(self.connections) - self.limits.max_connections
        if num_over > NUM_SPARE_CONNECTIONS:
            transport.abort()
            return
        self._is_spare = num_over > 0
        self._start_timer(SPARE_SECONDS if self._is_spare else HEADER_TIMEOUT_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._in_headers:
            self._num_header_bytes += len(data)  # all of it belongs to headers that have not ended yet
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(HttpError(431, "too long headers"))
        if self._timer is None and self.cycle is not None and self.cycle.response_complete:
            self._start_timer(HEADER_TIMEOUT_SECONDS)  # bytes that nobody waits for: not for ever

    # -- headers -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._num_header_bytes = 0
        self._start_timer(SPARE_SECONDS if self._is_spare else HEADER_TIMEOUT_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse(HttpError(431, "too many headers"))

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_headers = False
        if self._is_spare and self.url.partition(b"?")[0] not in OPEN_PATHS:
            self._refuse(UnavailableError("the server has too many connections"))
        if not self._is_refused:
            super().on_headers_complete()
            self.scope[CHUNK_WRITER] = ChunkWriter(self.cycle)  # type: ignore[literal-required]
            if self._is_spare:
                self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        self._refuse(HttpError(400, "this is not a valid HTTP request"))

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self._in_headers and self._num_header_bytes:
            self._refuse(HttpError(408, "the headers did not arrive in time"))
        else:
            self.transport.close()  # it has not asked for anything

    # -- a client that does not read ---------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _watch_stall(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.limits.stalled_client_seconds, self._check_stall, size)

    def _check_stall(self, size_before: int) -> None:
        """Nobody writes while writing is paused, so a buffer that has not shrunk was not read from at all."""
        if self.transport.get_write_buffer_size() < size_before:
            self._watch_stall()
            return
        logger.info("a client has not read for %.0f s: closing its connection", self.limits.stalled_client_seconds)
        self.transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # -- refusal -----------------------------------------------------------------------------------------------

    def _refuse(self, error: MiniInferError) -> None:
        """Answer, then drop what the client still sends: closing at once would reset the connection under the
        answer, and the client would never see it."""
        self._stop_timer()
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:  # the error would land inside of another answer
                self.transport.abort()
                return
            self.cycle.disconnected = True  # this is its answer; the application need not make one
            self.cycle.message_event.set()
        body = error_body(error)
        head = b"HTTP/1.1 %d %s\r\n" % (status := status_of(error), HTTPStatus(status).phrase.encode())
        for name, value in error_headers(error):
            head += name + b": " + value + b"\r\n"
        self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def bounded_protocol(config: HttpConfig) -> type[BoundedProtocol]:
    """The protocol class with these limits."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": config})
