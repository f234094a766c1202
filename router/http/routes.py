"""Routes that run without the layers of FastAPI: handlers read and check the request themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]
ErrorHandler = Callable[[Request, Exception], Awaitable[Response]]
HoldBody = Callable[[Scope, Receive], AbstractContextManager[Receive]]
NO_QUERY: Mapping[str, Any] = MappingProxyType({})


def json_response(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


@dataclass(frozen=True, slots=True)
class Described:
    """What one method of one path is for, and what a request says: `Routes.add`."""

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None
    query: Mapping[str, Any]


class Routes:
    """Routes in the order in which they are tried. A GET answers HEAD, too."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self.described: list[Described] = []  # the same ones, for people and programs (`router/api_docs`)
        self.open_paths: set[bytes] = set()  # as they are asked for, which need no API key
        self.tasks: list[Callable[[], Coroutine[Any, Any, None]]] = []  # run while the router serves

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        summary: str,
        body: type[BaseModel] | None = None,
        query: Mapping[str, Any] = NO_QUERY,
    ) -> None:
        """Serve a method of a path. body: the schema of its JSON; query: arguments by name, with their defaults,
        or the types of those without."""
        self.routes.append(Route(path, handler, methods=[method]))
        self.described.append(Described(method, path, summary, body, query))


class FixedPaths:
    """Serves routes without arguments in their path before any layer of the framework; `app` serves all others.

    These layers take 0.08 ms of a request and do nothing here: bodies, errors and limits are the handlers' own.
    """

    def __init__(self, app: ASGIApp, routes: Routes, answer_error: ErrorHandler, hold_body: HoldBody) -> None:
        """hold_body: gives a handler its request's body, and ends with the handler, before its answer is sent."""
        self._app = app
        self._answer_error = answer_error
        self._hold_body = hold_body
        self._handlers: dict[tuple[str, str], Handler] = {}
        for route in routes.routes:
            for method in route.methods or ():
                self._handlers.setdefault((method, route.path), route.endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            with self._hold_body(scope, receive) as receive_body:
                response = await handler(Request(scope, receive_body, send))
            await response(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - bugs too: their clients get a 500, unless the answer has begun
            answer = await self._answer_error(Request(scope), error)
            await answer(scope, receive, send)
