"""One snapshot a second for all watchers. There is no task: the first watcher in a second makes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from router.gateway import Gateway
from router.http.chunk_writer import ChunkWriter
from router.page.snapshot import Before, facts, figures

PAUSE_SECONDS = 3.0  # without a watcher, after which older counts are too old for rates


class Feed:
    """Server-sent events: `facts` at first and whenever they change, `now` each second."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._second = -1
        self._before = Before()
        self._facts: dict[str, Any] = {}
        self._facts_event = b""
        self._now_event = b""
        self._num_facts = 0

    async def events(self, writer: ChunkWriter) -> AsyncGenerator[bytes, None]:
        """Yield events until the client or the server ends."""
        kept, seen = writer.keeps_alive, -1
        while writer.keeps_alive == kept:
            self._look(time.monotonic())
            if seen == self._num_facts:
                yield self._now_event
            else:
                seen = self._num_facts
                yield self._facts_event + self._now_event
            await asyncio.sleep(1.0 - time.monotonic() % 1.0)

    def _look(self, now: float) -> None:
        """Make the snapshot of this second, unless it exists."""
        if int(now) == self._second:
            return
        self._second = int(now)
        told = facts(self._gateway)
        if told != self._facts:
            self._facts, self._facts_event = told, event("facts", told)
            self._num_facts += 1
        before = self._before if now - self._before.time < PAUSE_SECONDS else Before()
        changing, self._before = figures(self._gateway, before, now)
        self._now_event = event("now", changing)


def event(name: str, value: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(value))
