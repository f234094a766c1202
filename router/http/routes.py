"""Routes, and the application that serves them. Handlers read and check requests themselves."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Lifespan, Receive, Scope, Send

from common.errors import UnauthenticatedError
from router.http.errors import error_response, log_if_internal

Handler = Callable[[Request], Awaitable[Response]]
ErrorHandler = Callable[[Scope, Exception], Response]
HoldBody = Callable[[Scope, Receive], AbstractContextManager[Receive]]
NO_QUERY: Mapping[str, Any] = MappingProxyType({})
OPEN_PATHS = frozenset({b"/health", b"/readyz", b"/livez"})  # paths without API key


def json_response(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


@dataclass(frozen=True, slots=True)
class Described:
    """Description of one method of one path, see `Routes.add`."""

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None
    query: Mapping[str, Any]


class Routes:
    """Routes in the order in which they are tried. A GET answers HEAD, too."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self.described: list[Described] = []  # the same routes, for `router/api_docs`
        self.open_paths = set(OPEN_PATHS)  # raw paths
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
        """Serve a method of a path. body: the schema of its JSON; query: arguments by name with their defaults, or
        their types if they have none."""
        self.routes.append(Route(path, handler, methods=[method]))
        self.described.append(Described(method, path, summary, body, query))


class Application:
    """The ASGI application of a router: checks API keys, calls handlers, and answers their errors.

    Starlette's router serves paths with arguments; the others are looked up in a table, which is faster.
    """

    def __init__(
        self,
        routes: Routes,
        api_key: str,
        lifespan: Lifespan[Any],
        answer_error: ErrorHandler,
        hold_body: HoldBody | None,
    ) -> None:
        """hold_body: opens a context around each handler that gives it the body; exits before the answer is sent."""
        self._router = Router(routes.routes, lifespan=lifespan)
        self._open_paths = routes.open_paths
        self._api_key = api_key.encode()
        self._answer_error = answer_error
        self._hold_body: HoldBody = hold_body or (lambda _, receive: nullcontext(receive))
        self._handlers: dict[tuple[str, str], Handler] = {}
        for route in routes.routes:
            for method in route.methods or ():
                self._handlers.setdefault((method, route.path), route.endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        try:
            if self._is_allowed(scope):
                await self._serve(scope, receive, send)
            else:
                message = "the API key is missing or wrong: send it as 'Authorization: Bearer ...'"
                await error_response(UnauthenticatedError(message), scope, {})(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - the server would log its message, which may quote the request
            log_if_internal(scope, error)

    def _is_allowed(self, scope: Scope) -> bool:
        if not self._api_key or scope.get("raw_path") in self._open_paths:
            return True
        sent = dict(scope["headers"])
        scheme, _, key = sent.get(b"authorization", b"").partition(b" ")
        key = key if scheme.lower() == b"bearer" else sent.get(b"x-api-key", b"")  # as Anthropic's clients send it
        return hmac.compare_digest(key.strip(), self._api_key)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get((scope["method"], scope["path"]))
        try:
            if handler is None:
                scope["app"] = self  # so that the router raises HTTPException for an unknown path
                await self._router(scope, receive, send)
                return
            with self._hold_body(scope, receive) as receive_body:
                response = await handler(Request(scope, receive_body, send))
            await response(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - bugs too: the client gets a 500, unless the answer has begun
            await self._answer_error(scope, error)(scope, receive, send)
