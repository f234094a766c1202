"""The HTTP answer of a generation: one JSON body, or server-sent events, as a raw ASGI response.

Nothing is sent before the first update is there, so that a request that fails early gets a proper status. When
the client goes away, the task is cancelled, which cancels the request on the workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import EngineError, MiniInferError
from router.api.choice import Update
from router.api.generation import Generation
from router.api.render import ChoiceResult, Renderer, event
from router.http.chunk_writer import CHUNK_WRITER, ChunkWriter
from router.http.errors import error_body, error_headers, error_object, log_if_internal, status_of

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting for a worker\n\n"  # a comment: parsers of events skip it
KEEP_ALIVE_SECONDS = 5.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
Selector = Callable[[list[ChoiceResult]], Sequence[ChoiceResult]]


class GenerationResponse(Response):
    """Runs a generation when it is sent. `select` picks the choices of a whole answer (best_of)."""

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        headers: list[tuple[bytes, bytes]],
        is_stream: bool,
        include_usage: bool,
        continuous_usage: bool,
        select: Selector = list,
    ) -> None:
        self.background = None
        self._generation = generation
        self._renderer = renderer
        self._extra_headers = headers
        self._is_stream = is_stream
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._select = select
        self._client_left = False
        self._begun: set[int] = set()  # choices that have shown something
        self._keep_alive_timer: asyncio.TimerHandle | None = None
        self._num_open = len(generation.runs)
        self._usage = generation.usage()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._watch(receive, task))
        try:
            if self._is_stream:
                await self._send_stream(scope, send, scope.get(CHUNK_WRITER))
            else:
                await self._send_answer(scope, send)
        except asyncio.CancelledError:
            if not self._client_left or task.uncancel():
                raise
        finally:
            watcher.cancel()
            if self._keep_alive_timer is not None:
                self._keep_alive_timer.cancel()

    async def _watch(self, receive: Receive, task: asyncio.Task[object]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_left = True
        task.cancel()

    # -- one JSON body -----------------------------------------------------------------------------------------

    async def _send_answer(self, scope: Scope, send: Send) -> None:
        runs = self._generation.runs
        results = {run.choice.index: ChoiceResult(run.choice.index, run.prompt_index) for run in runs}
        try:
            async with aclosing(self._generation.updates()) as updates:
                async for index, update in updates:
                    results[index].add(update)
        except MiniInferError as error:
            await self._send_error(scope, send, error)
            return
        body = self._renderer.answer(self._select(list(results.values())), self._generation.usage())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *self._extra_headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_error(self, scope: Scope, send: Send, error: MiniInferError) -> None:
        log_if_internal(scope, error)
        body = error_body(error)
        headers = [*error_headers(error), (b"content-length", b"%d" % len(body)), *self._extra_headers]
        await send({"type": "http.response.start", "status": status_of(error), "headers": headers})
        await send({"type": "http.response.body", "body": body})

    # -- server-sent events ------------------------------------------------------------------------------------

    async def _send_stream(self, scope: Scope, send: Send, writer: ChunkWriter | None) -> None:
        has_begun = False
        last = b""  # what is sent together with the end
        try:
            async with aclosing(self._generation.updates()) as updates:
                async for index, update in updates:
                    body = self._body(index, update)
                    if self._num_open == 0:
                        last = body
                        continue
                    if not body:
                        continue
                    if not has_begun:
                        has_begun = True
                        await self._begin(send)
                        self._offer_shortcut(writer)
                        self._keep_alive(writer)
                    if writer is not None and writer.is_ready:
                        writer.write(body)
                    else:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._include_usage:
                last += self._renderer.usage_chunk(self._generation.usage())
        except MiniInferError as error:
            if not has_begun:
                await self._send_error(scope, send, error)
                return
            log_if_internal(scope, error)
            last = event(error_object(error))
        except Exception as error:  # a bug: the stream must still end in a way that the client understands
            if not has_begun:
                raise
            log_if_internal(scope, error)
            last = event(error_object(EngineError("internal error")))
        if not has_begun:
            await self._begin(send)
        await send({"type": "http.response.body", "body": last + DONE, "more_body": False})

    def _offer_shortcut(self, writer: ChunkWriter | None) -> None:
        """Let tokens of a plain single choice be written where they arrive, while the client keeps up."""
        run, plain = self._generation.runs[0], self._renderer.plain
        if len(self._generation.runs) > 1 or plain is None or writer is None or not run.choice.is_plain:
            return
        index, push = run.choice.index, run.choice.push_plain

        def write_now(token_ids: list[int]) -> bool:
            if not writer.is_ready:
                return False
            if body := plain.render(index, push(token_ids)):
                writer.write(body)
            return True

        run.journal.shortcut = write_now

    def _keep_alive(self, writer: ChunkWriter | None) -> None:
        """While choices wait for a worker, show the client, and proxies, that the stream goes on."""
        if writer is None:
            return
        if writer.is_ready and any(run.journal.is_waiting_for_worker for run in self._generation.runs):
            writer.write(KEEP_ALIVE)
        loop = asyncio.get_running_loop()
        self._keep_alive_timer = loop.call_later(KEEP_ALIVE_SECONDS, self._keep_alive, writer)

    async def _begin(self, send: Send) -> None:
        headers = [*_STREAM_HEADERS, *self._extra_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _body(self, index: int, update: Update) -> bytes:
        """The piece of the stream that tells of one update; empty when there is nothing to tell."""
        if self._continuous_usage:
            self._usage = self._generation.usage()
        body = self._renderer.chunk(index, update, self._usage)
        if index not in self._begun:
            self._begun.add(index)
            body = self._renderer.start(index, self._usage) + body
        if update.finish_reason is not None:
            self._num_open -= 1
        return body
