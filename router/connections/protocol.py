"""Limits on everything that a client can send over one HTTP connection.

All of a request except its body (headers, trailers, chunk extensions, the start of the next request) counts against
one limit. A refusal is an error in JSON, after which the connection closes. `connection_slots` decides which clients
get a connection.
"""

from __future__ import annotations

import asyncio
import resource

import httptools

from common.errors import ConfigError, MiniInferError, UnavailableError
from router.config import HttpConfig
from router.connections.connection import Connection
from router.connections.connection_slots import ConnectionSlots
from router.connections.http_settings import ConnectionSettings
from router.connections.rules import (
    CHUNK_FRAMING_BYTES,
    MAX_CHUNKS,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    check_head,
    head_bytes,
)
from router.http.errors import HttpError
from router.http.routes import OPEN_PATHS

HEADER_TIMEOUT_SECONDS = 10.0
SPARE_SECONDS = 1.0  # time for a connection in a spare slot to send its request
MAX_LINGER_BYTES = 32 << 20
NUM_OTHER_DESCRIPTORS = 256  # connections to workers, files, libraries
MAX_PIPELINED = 16  # requests that may wait for the answer to an earlier one


class _StopParsing(Exception):
    """Ends parsing: the rest of these bytes is ignored. A callback can stop the parser in no other way."""


class BoundedProtocol(Connection):
    """One connection. `limits` and `slots` belong to the class: see `bounded_protocol`."""

    slots: ConnectionSlots[BoundedProtocol]
    # of the arriving request
    _in_headers = False
    _num_other_bytes = 0  # bytes that are not a body
    _has_ended = False  # an earlier request has ended whose head is counted in _num_other_bytes
    _num_chunks = 0
    # of the connection
    _is_spare = False
    _timer: asyncio.TimerHandle | None = None  # until the headers are complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        displaced = self.slots.enter(self, self.client[0] if self.client else "")
        if displaced is not None:
            displaced.abort()
        self._is_spare = self.slots.is_spare(self)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.slots.leave(self)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._discards_input:
            self._num_other_bytes += len(data)
            if self._num_other_bytes > MAX_LINGER_BYTES:
                self.abort()
            return
        self._unset_keepalive_if_required()
        if not self._in_message:
            self._num_other_bytes = 0
            self._has_ended = False
        self._num_other_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if not self._discards_input:
                self._refuse(HttpError(400, "this is not a valid HTTP request"))
            return
        if self._in_message and self._num_other_bytes > MAX_HEADER_BYTES:
            self._refuse(HttpError(431, "too long headers, trailers or chunk extensions"))
        elif self._running is None and self._timer is None:
            self._start_timer()  # bytes that begin no request are tolerated for a limited time

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser takes all that follows for another protocol. Upgrading is optional: parse the same request
            # without the upgrade header, or the body of clients that always offer HTTP/2 (Java's) would be lost.
            method = self.parser.get_method()
            if method == b"CONNECT":
                self._refuse(HttpError(501, "this server is no proxy"))
                return
            lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            head = b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._has_ended = False
            self._parse(b"".join((head, *lines, b"\r\n", data[upgrade.args[0] :])))

    # -- a request as it arrives -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:  # answer those, then close: the client may repeat the rest
            self.cycle.keep_alive = False
            self._discards_input = True
            raise _StopParsing
        if self._has_ended:
            self._num_other_bytes -= head_bytes(self.url, self.headers)
            self._has_ended = False
        super().on_message_begin()
        self._in_message = self._in_headers = True
        self._num_chunks = 0
        if self._running is None:
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            return  # trailers are dropped
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._stop(HttpError(431, "too many headers"))

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_headers = False
        if self.parser.should_upgrade():
            return  # _parse repeats the request without the upgrade
        if self._num_other_bytes > MAX_HEADER_BYTES and head_bytes(self.url, self.headers) > MAX_HEADER_BYTES:
            self._stop(HttpError(431, "too long headers"))
        try:
            check_head(self.parser.get_http_version(), self.headers)
        except HttpError as error:
            self._stop(error)
        if self._is_spare and self.url.partition(b"?")[0] not in OPEN_PATHS:
            self._stop(UnavailableError("the server has too many connections"))
        super().on_headers_complete()
        cycle = self.cycle
        cycle.transport = self._cycle_transport
        # Close after an answer that precedes the request's end, since the length of the rest is unknown.
        self._may_stay, cycle.keep_alive = cycle.keep_alive and not self._is_spare, False

    def on_chunk_header(self) -> None:
        self._num_other_bytes = max(self._num_other_bytes - CHUNK_FRAMING_BYTES, 0)
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS:
            self._stop(HttpError(413, f"the body has more than {MAX_CHUNKS} chunks"))

    def on_body(self, body: bytes) -> None:
        self._num_other_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._has_ended = True
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._may_stay

    def _stop(self, error: MiniInferError) -> None:
        self._refuse(error)
        raise _StopParsing

    def _start_timer(self) -> None:
        self._stop_timer()
        seconds = SPARE_SECONDS if self._is_spare else HEADER_TIMEOUT_SECONDS
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self._in_message:
            self._refuse(HttpError(408, "the headers did not arrive in time"))
        else:
            self.transport.close()  # it has not sent a request

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._running is None and self._in_message and not self._is_lingering:
            self._start_timer()  # the headers of the next request have begun: limit the time for the rest

    def _refuse(self, error: MiniInferError) -> None:
        self._stop_timer()
        super()._refuse(error)


def bounded_protocol(config: HttpConfig) -> type[BoundedProtocol]:
    """Return the protocol class of one server with these limits. Raises ConfigError if the process may not open
    enough."""
    limits = config.of(ConnectionSettings)
    slots = ConnectionSlots[BoundedProtocol](limits.max_connections, limits.reserved_per_address)
    allow_descriptors(slots.max_open + NUM_OTHER_DESCRIPTORS)
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits, "slots": slots})


def allow_descriptors(count: int) -> None:
    """Make sure that this process may open `count` descriptors. Raises ConfigError otherwise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigError(
            f"this process may open {hard} files and connections, but --max-connections needs {count}: "
            "raise the limit (ulimit -n) or lower --max-connections"
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
