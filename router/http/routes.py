"""Routes that FastAPI describes and that run without its layers: handlers read and check the request themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import orjson
from fastapi import Body
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import ASGIApp, Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]
ErrorHandler = Callable[[Request, Exception], Awaitable[Response]]
# What any answer may be instead. Without it, FastAPI would describe errors of its own, which no handler raises.
ERRORS: dict[int | str, dict[str, Any]] = {"default": {"description": "An error: message, type, parameter and code."}}
NO_QUERY: Mapping[str, Any] = MappingProxyType({})


def json_response(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


class DescribedRoute(APIRoute):
    """One method of one path. A GET answers HEAD, too.

    FastAPI would parse each body and argument a second time, so it sees a signature only: what `body` and `query`
    say of the request. The handler gets it untouched, and its errors have the shape of the API that was asked.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        summary: str,
        body: type[BaseModel] | None,
        query: Mapping[str, Any],
    ) -> None:
        kind = inspect.Parameter.KEYWORD_ONLY
        found = [inspect.Parameter(name, kind, annotation=str) for name in re.findall(r"{(\w+)", path)]
        for name, told in query.items():
            annotation, default = (told | None, None) if isinstance(told, type) else (type(told), told)
            found.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
        if body is not None:
            found.append(inspect.Parameter("body", kind, annotation=Annotated[body, Body()]))

        async def described() -> None:
            """FastAPI reads the signature and never calls it."""

        described.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
        super().__init__(
            path, described, methods=[method], summary=summary, name=summary, operation_id=f"{method.lower()} {path}",
            responses=dict(ERRORS), response_model=None, response_class=Response, response_description="The answer.",
        )  # fmt: skip
        self.handler = handler
        self.body_kind = body
        self.app = request_response(handler)
        self.methods = {method, "HEAD"} if method == "GET" else {method}


class Routes:
    """Routes in the order in which they are tried."""

    def __init__(self) -> None:
        self.routes: list[DescribedRoute] = []
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
        self.routes.append(DescribedRoute(method, path, handler, summary, body, query))


class FixedPaths:
    """Serves routes without arguments in their path before any layer of the framework; `app` serves all others.

    These layers take 0.08 ms of a request and do nothing here: bodies, errors and limits are the handlers' own.
    """

    def __init__(self, app: ASGIApp, routes: Routes, answer_error: ErrorHandler) -> None:
        self._app = app
        self._answer_error = answer_error
        self._handlers: dict[tuple[str, str], Handler] = {}
        for route in routes.routes:
            for method in route.methods or ():
                self._handlers.setdefault((method, route.path), route.handler)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await handler(request)
            await response(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - bugs too: their clients get a 500, unless the answer has begun
            answer = await self._answer_error(request, error)
            await answer(scope, receive, send)
