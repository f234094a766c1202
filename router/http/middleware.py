"""Who may ask, and who may change the cluster: middleware that checks API keys before a route sees a request.

Plain ASGI. Also the last to see an exception that a route let through: a bug, which is logged here if it was not.
"""

from __future__ import annotations

import hmac
from collections.abc import Set

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import MiniInferError, UnauthenticatedError
from common.net.hosts import is_loopback
from router.http.errors import error_response, log_if_internal

OPEN_PATHS = frozenset({b"/healthz", b"/health", b"/readyz", b"/livez", b"/ping"})


class Guard:
    """Refuses what no route may see."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: Set[bytes]) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS | open_paths
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except MiniInferError as error:
            await error_response(error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - the server would log its message, which may quote the request
            log_if_internal(scope, error)

    def _check(self, scope: Scope) -> None:
        if not self._api_key or scope.get("raw_path") in self._open_paths:
            return
        sent = dict(scope["headers"])
        scheme, _, key = sent.get(b"authorization", b"").partition(b" ")
        key = key if scheme.lower() == b"bearer" else sent.get(b"x-api-key", b"")  # as Anthropic's clients send it
        if not hmac.compare_digest(key.strip(), self._api_key):
            raise UnauthenticatedError("the API key is missing or wrong: send it as 'Authorization: Bearer ...'")


def check_operator(request: Request, api_key: str, what: str) -> None:
    """Without an API key, refuse requests from other machines and from pages in a browser: anybody who reaches the
    port could change the cluster. With one, it has been checked. what: is refused, in words."""
    if api_key:
        return
    host = request.client.host if request.client else ""
    if not is_loopback(host) or "origin" in request.headers:
        raise UnauthenticatedError(
            f"{what} from another machine or a page needs an API key on the router (--api-key)"
        )
