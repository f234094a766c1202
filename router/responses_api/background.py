"""Background responses: each answer is streamed into memory, and any number of clients read its events from there.

This module knows ASGI and nothing about generation: the answer runs as for a client that never disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
from starlette.responses import Response
from starlette.types import Message, Scope

from router.http.chunk_writer import CHUNK_WRITER
from router.http.errors import error_object, log_if_internal
from router.responses_api.renderer import ResponsesRenderer

_END = b"\n\n"  # ends an event, and never occurs within one


class _NoWriter:
    """Stands for a connection that does not exist: every event comes through `send`."""

    is_ready = False


class BackgroundResponse:
    """One response that runs in the background."""

    def __init__(self, answer: Response, renderer: ResponsesRenderer, scope: Scope) -> None:
        """answer: a stream of `renderer`'s events, which starts now. scope: of the request that asked for it."""
        self._renderer = renderer
        self._events: list[bytes] = []  # indexed by sequence number
        self._grown = asyncio.Event()
        self._cancel = asyncio.Event()
        self._status = 200
        self._has_all = False
        self._add(renderer.queued())
        self.task = asyncio.create_task(self._run(answer, {**scope, CHUNK_WRITER: _NoWriter()}))

    @property
    def is_over(self) -> bool:
        return self._renderer.is_over

    def snapshot(self) -> bytes:
        """Return the response as it is now."""
        return orjson.dumps(self._renderer.snapshot())

    async def events(self, first: int) -> AsyncIterator[bytes]:
        """Yield the events from sequence number `first` on, including those still to come."""
        while True:
            grown = self._grown
            if new := self._events[first:]:
                first += len(new)
                yield b"".join(new)
            elif self._has_all:
                return
            else:
                await grown.wait()

    async def cancel(self) -> None:
        """End the generation and wait until the response is over."""
        self._cancel.set()
        await asyncio.wait([self.task])

    # -- the answer's client -----------------------------------------------------------------------------------

    async def _run(self, answer: Response, scope: Scope) -> None:
        try:
            await answer(scope, self._receive, self._send)
            if not self._renderer.is_over:
                self._add(self._renderer.cancelled())
        except Exception as error:  # noqa: BLE001 - bugs, too: a response must end in a way that clients understand
            log_if_internal(scope, error)
            self._add(self._renderer.failure(error_object(error, scope)))
        finally:
            self._has_all = True
            self._grown.set()

    async def _receive(self) -> Message:
        await self._cancel.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            self._add(message["body"])
        else:  # the request failed before its first event
            self._add(self._renderer.failure(orjson.loads(message["body"])))

    def _add(self, body: bytes) -> None:
        self._events += [event + _END for event in body.split(_END)[:-1]]
        self._grown.set()
        self._grown = asyncio.Event()


class Background:
    """The running background responses by id."""

    def __init__(self) -> None:
        self._running: dict[str, BackgroundResponse] = {}

    def start(
        self, response_id: str, answer: Response, renderer: ResponsesRenderer, scope: Scope
    ) -> BackgroundResponse:
        running = self._running[response_id] = BackgroundResponse(answer, renderer, scope)
        running.task.add_done_callback(lambda _: self._running.pop(response_id))
        return running

    def get(self, response_id: str) -> BackgroundResponse | None:
        """Return a running response; None if it is over (and stored), or never ran here."""
        running = self._running.get(response_id)
        return None if running is None or running.is_over else running

    async def end_with_the_router(self) -> None:
        """Wait until the router ends, then cancel what still runs."""
        try:
            await asyncio.Event().wait()
        finally:
            tasks = [running.task for running in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
