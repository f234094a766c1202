"""The life of one HTTP connection beyond uvicorn's: answers in order, clients that are gone, closing.

Nothing is read while a request waits for an earlier one's answer, or after the client's FIN. A timer then asks the
socket whether the client is still there (docs/decisions/http-connections.md). `protocol` bounds what may arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from common.errors import MiniInferError
from router.connections.client_watch import ClientWatch
from router.connections.http_settings import ConnectionSettings
from router.http.chunk_writer import ChunkProtocol
from router.http.errors import HttpError, error_headers, error_object, status_of

LINGER_SECONDS = 1.0


class _Flow(FlowControl):
    """Reads nothing while a request waits for an earlier one's answer; uvicorn would go on after each answer."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized, when_paused: Callable[[], None]) -> None:
        super().__init__(transport)
        self._waiting = waiting
        self._when_paused = when_paused

    def pause_reading(self) -> None:
        super().pause_reading()
        self._when_paused()

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class _CycleTransport:
    """The transport that an answer uses; its `close` does not cut off a client that is still sending."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class Connection(ChunkProtocol):
    """One connection. `limits` is an attribute of the class, since uvicorn creates the instances."""

    limits = ConnectionSettings()
    _running: RequestResponseCycle | None = None  # the request that is being answered
    _in_message = False  # a request is arriving
    _may_stay = False  # whether to keep the connection after the answer to the arriving request
    _discards_input = False  # whatever still arrives is dropped
    _is_lingering = False  # waits until the client has read its last answer
    _has_eof = False  # the client sends nothing more, and may be gone

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch = ClientWatch(self.loop, transport, self.watched, self.abort, self.limits.stalled_client_seconds)
        self.flow = _Flow(transport, self.pipeline, self._watch.start)
        self._cycle_transport: Any = _CycleTransport(transport, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.stop()
        self._end_answers()
        super().connection_lost(exc)
        # These refer back to the connection: without them it is freed now, not when the garbage collector runs.
        self.cycle = self._running = self._cycle_transport = None  # type: ignore[assignment]

    # -- closing -----------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Close now. Answers end at once: the event loop reports the end later, and writes until then would fail."""
        self._end_answers()
        self.transport.abort()

    def _end_answers(self) -> None:
        """End the request that is being answered; uvicorn would end only the one that arrived last."""
        self.pipeline.clear()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

    def shutdown(self) -> None:
        self._may_stay = False
        if self._running is None:
            self.transport.close()
            return
        self.pipeline.clear()
        self._running.keep_alive = False

    def _close(self) -> None:
        """Close after the last answer on this connection."""
        if (self._in_message or self._discards_input) and not self.transport.is_closing():
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close for sending, drop what the client still sends, then close. Closing at once would reset the
        connection, and the client would never see the answer."""
        self._discards_input = self._is_lingering = True
        self.pipeline.clear()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    # -- answers, in order ---------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)
        if self._has_eof:
            self._watch.probe(cycle)
            self._watch.start()

    def on_response_complete(self) -> None:
        self._running = None
        if self._is_lingering:
            return
        super().on_response_complete()
        if self._running is None and self._has_eof:  # no request waits
            self.transport.close()

    # -- a client that is gone ---------------------------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle a FIN. A client that only closed its half (nc -N) still gets its answers."""
        if self._is_lingering or (self._running is None and not self._in_message):
            return False  # closes
        if self._in_message:
            self._refuse(HttpError(400, "the connection was closed before the request was complete"))
            return False
        self._has_eof = True
        self._watch.probe(self._running)
        self._watch.start()
        return True

    def watched(self) -> RequestResponseCycle | None:
        """Return the running request if the client may be gone unnoticed, because nothing is read."""
        return self._running if self._has_eof or self.flow.read_paused else None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch.writing_paused()

    def resume_writing(self) -> None:
        self._watch.writing_resumed()
        super().resume_writing()

    # -- refusal -----------------------------------------------------------------------------------------------

    def _refuse(self, error: MiniInferError) -> None:
        """Answer the arriving request with an error, and close."""
        self._discards_input = True
        if self._is_lingering or self.transport.is_closing():
            return
        running = self._running
        if running is not None and (running.response_started or not running.more_body):
            self.abort()  # the error would become a part of the answer to an earlier request
            return
        self._end_answers()  # the error is the answer; the application need not make one
        body = orjson.dumps(error_object(error, {}))
        head = b"HTTP/1.1 %d %s\r\n" % (status := status_of(error), HTTPStatus(status).phrase.encode())
        for name, value in error_headers(error).items():
            head += f"{name}: {value}\r\n".encode()
        self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        self._linger()
