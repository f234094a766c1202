"""Routes, and what a documentation of them needs to know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]


def json_response(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


@dataclass(frozen=True)
class Operation:
    """One method of one path, as the documentation shows it."""

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None


class Routes:
    """Routes in the order in which they are tried, with what the documentation says of each. A GET answers HEAD,
    too."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self.operations: list[Operation] = []

    def add(
        self, method: str, path: str, handler: Handler, summary: str, body: type[BaseModel] | None = None
    ) -> None:
        self.routes.append(Route(path, handler, methods=[method]))
        self.operations.append(Operation(method, path.replace(":path}", "}"), summary, body))
