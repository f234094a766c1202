"""The HTTP answer of a generation request, as a raw ASGI response: one JSON body, or a stream of events (`sse`).

Nothing is sent before the first update is there, so that a request that fails early gets a proper status. When the
client goes away, the task is cancelled, which cancels the request on the workers.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import MiniInferError
from router.api.render import Renderer
from router.api.results import ChoiceResult
from router.api.text import Update
from router.http.chunk_writer import CHUNK_WRITER
from router.http.errors import error_response, log_if_internal
from router.http.sse import EventStream, Headers
from router.request import GenerationRequest


class GenerationResponse(Response):
    """Runs a request when it is sent."""

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
    """Collects the choices of an answer in one piece."""

    def __init__(self, request: GenerationRequest, renderer: Renderer, headers: Headers) -> None:
        self._request = request
        self._renderer = renderer
        self._headers = headers
        self._results = [ChoiceResult(choice.index, choice.prompt_index) for choice in request.choices]
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
