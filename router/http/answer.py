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
from router.api.results import ChoiceResult, Selector
from router.api.text import Update
from router.http.chunk_writer import CHUNK_WRITER
from router.http.errors import error_body, error_headers, log_if_internal, status_of
from router.http.sse import EventStream
from router.request import GenerationRequest

Headers = list[tuple[bytes, bytes]]


class GenerationResponse(Response):
    """Runs a request when it is sent. `select` picks the choices of a whole answer (best_of)."""

    def __init__(
        self,
        request: GenerationRequest,
        renderer: Renderer,
        headers: Headers,
        is_stream: bool,
        select: Selector = list,
    ) -> None:
        self.background = None
        self._request = request
        self._renderer = renderer
        self._extra_headers = headers
        self._is_stream = is_stream
        self._select = select
        self._client_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._watch(receive, task))
        try:
            if self._is_stream:
                stream = EventStream(self._request, self._renderer, scope[CHUNK_WRITER], self._extra_headers)
                self._request.start(stream)
                await stream.send(scope, send)
            else:
                answer = WholeAnswer(self._request)
                self._request.start(answer)
                await answer.is_complete.wait()
                await self._send_answer(answer, send)
        except MiniInferError as error:  # before anything was sent
            await self._send_error(scope, send, error)
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

    async def _send_answer(self, answer: WholeAnswer, send: Send) -> None:
        if answer.error is not None:
            raise answer.error
        body = self._renderer.answer(self._select(list(answer.results.values())), self._request.usage())
        await _send_body(send, 200, [(b"content-type", b"application/json"), *self._extra_headers], body)

    async def _send_error(self, scope: Scope, send: Send, error: MiniInferError) -> None:
        log_if_internal(scope, error)
        await _send_body(send, status_of(error), [*error_headers(error), *self._extra_headers], error_body(error))


class WholeAnswer:
    """Collects the choices of an answer in one piece."""

    def __init__(self, request: GenerationRequest) -> None:
        self.results = {choice.index: ChoiceResult(choice.index, choice.prompt_index) for choice in request.choices}
        self.error: Exception | None = None
        self.is_complete = asyncio.Event()
        self._num_open = len(self.results)

    def on_update(self, index: int, update: Update) -> None:
        self.results[index].add(update)
        if update.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open:
                self.is_complete.set()

    def on_failure(self, error: Exception) -> None:
        self.error = error
        self.is_complete.set()


async def _send_body(send: Send, status: int, headers: Headers, body: bytes) -> None:
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
