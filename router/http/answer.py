"""The HTTP response of a generation request as raw ASGI: one JSON body, or a stream of events.

Nothing is sent before the first update, so that a request that fails early gets a proper status. When the client
disconnects, the task is cancelled, which cancels the request on the workers.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import MiniInferError
from router.api.render import Renderer
from router.api.text import ChoiceResult, Update
from router.http.chunk_writer import CHUNK_WRITER, ChunkWriter
from router.http.errors import error_object, error_response, log_if_internal
from router.request import GenerationRequest

KEEP_ALIVE = b": waiting for a worker\n\n"  # a comment, which event parsers skip
KEEP_ALIVE_SECONDS = 5.0
Headers = dict[str, str]
EVENT_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class GenerationResponse(Response):
    """Runs a request while it is sent."""

    def __init__(self, request: GenerationRequest, renderer: Renderer, headers: Headers, is_stream: bool) -> None:
        self.background = None
        self._request = request
        self._renderer = renderer
        self._extra_headers = headers
        self._is_stream = is_stream
        self._client_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        parts = self._request, self._renderer, self._extra_headers
        sink = EventStream(*parts, scope[CHUNK_WRITER]) if self._is_stream else WholeAnswer(*parts)
        watcher = asyncio.create_task(self._watch(receive, task))
        try:
            self._request.start(sink)
            await sink.respond(scope, receive, send)
        except MiniInferError as error:  # before anything was sent
            log_if_internal(scope, error)
            await error_response(error, scope, self._extra_headers)(scope, receive, send)
        except asyncio.CancelledError:
            if not self._client_left or task.uncancel():
                raise
        finally:
            watcher.cancel()
            self._request.close()

    async def _watch(self, receive: Receive, task: asyncio.Task[object]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_left = True
        task.cancel()


class WholeAnswer:
    """Collects the choices of an answer that is not streamed."""

    def __init__(self, request: GenerationRequest, renderer: Renderer, headers: Headers) -> None:
        self._request = request
        self._renderer = renderer
        self._headers = headers
        self._results = [ChoiceResult(choice.index) for choice in request.choices]
        self._num_open = len(self._results)
        self._error: Exception | None = None
        self._is_complete = asyncio.Event()

    def on_update(self, index: int, update: Update) -> None:
        self._results[index].add(update)
        if update.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open:
                self._is_complete.set()

    def on_failure(self, error: Exception) -> None:
        self._error = error
        self._is_complete.set()

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return when the answer has been sent. Raises the request's error."""
        await self._is_complete.wait()
        if self._error is not None:
            raise self._error
        body = self._renderer.answer(self._results, self._request.usage())
        await Response(body, headers=self._headers, media_type="application/json")(scope, receive, send)


class EventStream:
    """Sends an answer as server-sent events, each written as soon as its token arrives.

    While the client keeps up, an update goes from the worker's report to the socket in one call (`on_update`).
    Updates that come before the headers are sent, or while the transport's buffer is full, are kept; they are at most
    the rest of the answer. The task in `respond` sends them, in one event per choice, and the end.
    """

    def __init__(self, request: GenerationRequest, renderer: Renderer, headers: Headers, writer: ChunkWriter) -> None:
        self._request = request
        self._renderer = renderer
        self._writer = writer
        self._headers = [(name.encode(), value.encode()) for name, value in (EVENT_STREAM_HEADERS | headers).items()]
        self._has_begun = False  # the headers are sent
        self._is_caught_up = False  # the transport has taken all kept updates
        self._shown: set[int] = set()  # choices of which an event has been rendered
        self._kept: dict[int, ChoiceResult] = {}  # merged updates by choice
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._num_open = len(request.choices)
        self._usage = request.usage()
        self._counts_usage = renderer.options.continuous_usage
        self._keep_alive_timer: asyncio.TimerHandle | None = None

    # -- calls of the request ----------------------------------------------------------------------------------

    def on_update(self, index: int, update: Update) -> None:
        if update.finish_reason is not None:
            self._num_open -= 1
        if self._is_caught_up and self._num_open and not self._kept and self._writer.is_ready:
            if body := self._rendered(index, update):
                self._writer.write(body)
            return
        self._kept.setdefault(index, ChoiceResult(index)).add(update)
        self._wake.set()

    def on_failure(self, error: Exception) -> None:
        self._error = error
        self._wake.set()

    # -- the task: beginning, end, and updates that a slow client could not take ---------------------------------

    async def respond(self, scope: Scope, _: Receive, send: Send) -> None:
        """Return when everything has been sent. Raises the request's error if nothing has been sent."""
        try:
            last = await self._send_kept(send)
            last += self._renderer.end(self._request.usage())
            await self._begin(send)
        except Exception as error:  # bugs, too: a stream that has begun must end with an event
            if not self._has_begun:
                raise
            log_if_internal(scope, error)
            last = self._renderer.failure(error_object(error, scope))
        finally:
            if self._keep_alive_timer is not None:
                self._keep_alive_timer.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_kept(self, send: Send) -> bytes:
        """Send kept updates whenever the client can take them; return the bytes to send together with the end."""
        while True:
            self._is_caught_up = self._has_begun
            await self._wake.wait()
            self._wake.clear()
            self._is_caught_up = False  # `send` may wait for the client; later updates must follow these
            kept, self._kept = self._kept, {}
            body = b"".join(self._rendered(index, update) for index, update in kept.items())
            if not (self._num_open or self._error):
                return body
            if body and (self._has_begun or not self._error):
                await self._begin(send)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._error is not None:
                raise self._error

    async def _begin(self, send: Send) -> None:
        if not self._has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self._has_begun = True
            self._keep_alive()

    def _keep_alive(self) -> None:
        """Send comments while choices wait for a worker, so that clients and proxies do not close the stream."""
        if self._request.is_waiting_for_worker and self._writer.is_ready:
            self._writer.write(KEEP_ALIVE)
        loop = asyncio.get_running_loop()
        self._keep_alive_timer = loop.call_later(KEEP_ALIVE_SECONDS, self._keep_alive)

    def _rendered(self, index: int, update: Update | ChoiceResult) -> bytes:
        """Render one update as events; empty when there is nothing to send."""
        begins = index not in self._shown
        if self._counts_usage or begins:  # by now the worker has told how much of the prompt was cached
            self._usage = self._request.usage()
        body = self._renderer.chunk(index, update, self._usage)
        if begins:
            self._shown.add(index)
            body = self._renderer.start(index, self._usage) + body
        return body
