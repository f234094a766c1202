"""Detects whether a client is still connected and reads, which asyncio does not report while reading is paused.

After a FIN the client may be gone, or may only have closed its half and wait. So bytes are sent to it: the machine of
a client that is gone answers with a reset, and a timer polls the socket for that
(docs/decisions/http-connections.md).
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from common.logging import RateLimit

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())
CHECK_SECONDS = 0.25


class ClientWatch:
    """Watches the client of one connection. `watched` returns the request that is being answered while nothing is
    read from the client; None: there is nothing to watch."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        watched: Callable[[], RequestResponseCycle | None],
        abort: Callable[[], None],
        stalled_client_seconds: float,
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._watched = watched
        self._abort = abort
        self._stalled_client_seconds = stalled_client_seconds
        self._probed: RequestResponseCycle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Release the connection, which has ended."""
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._watched = self._abort = _nothing

    # -- a client that is gone ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Poll the socket regularly, as long as there is something to watch."""
        if self._timer is None:
            self._timer = self._loop.call_later(CHECK_SECONDS, self._check)

    def _check(self) -> None:
        self._timer = None
        cycle = self._watched()
        if cycle is None or self._transport.is_closing():
            return
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        events = sum(mask for _, mask in poll.poll(0))
        if events & (select.POLLERR | select.POLLHUP):
            self._abort()
            return
        if events & select.POLLRDHUP:
            self.probe(cycle)
        self.start()

    def probe(self, cycle: RequestResponseCycle | None) -> None:
        """Send bytes that a client skips, once per request after a FIN: before the answer an interim response (unless
        the client speaks HTTP/1.0), inside a stream of events a comment. Only event streams are sent in chunks."""
        if cycle is None or cycle is self._probed:
            return
        self._probed = cycle
        if not cycle.response_started:
            if cycle.scope["http_version"] != "1.0":
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.chunked_encoding:
            self._transport.write(b"3\r\n:\n\n\r\n")

    # -- a client that does not read ---------------------------------------------------------------------------

    def writing_paused(self) -> None:
        size = self._transport.get_write_buffer_size()
        self._stall_timer = self._loop.call_later(self._stalled_client_seconds, self._check_stall, size)

    def writing_resumed(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_stall(self, size_before: int) -> None:
        """Abort a stalled client. Nothing is written while writing is paused, so a buffer that has not shrunk means
        that the client has read nothing."""
        if self._transport.get_write_buffer_size() < size_before:
            self.writing_paused()
            return
        logger.info("a client has not read for %.0f s: closing its connection", self._stalled_client_seconds)
        self._abort()


def _nothing() -> None:
    return None
