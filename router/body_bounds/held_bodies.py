"""Counts the bytes of request bodies, of all requests of a router."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from common.config import Settings
from common.errors import OverloadedError
from router.body_bounds.http_settings import BodySettings

UNCOUNTED_BYTES = 64 << 10  # of each body: 128 MB for 2,048 connections


class HeldBodies:
    """A limit on the bytes of one router's request bodies. Belongs to one event loop.

    A body counts from its first byte until its request has the prompt's tokens. The first part of each body is free:
    the limit on connections bounds it, and ordinary requests pass while others send large ones.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0  # counted bytes that are held now

    @contextmanager
    def hold(self, scope: Scope, receive: Receive) -> Iterator[Receive]:
        """Receive one request's body, and hold it until the context ends.

        Receiving raises OverloadedError if there is no room for the body, or for its declared length.
        """
        size = num_counted = 0

        async def counting() -> Message:
            nonlocal size, num_counted
            if not size:
                self._check(_counted(int(Headers(scope=scope).get("content-length", "0"))))
            message = await receive()
            size += len(message.get("body", b""))
            more = _counted(size) - num_counted
            self._check(more)
            self.num_bytes += more
            num_counted += more
            return message

        try:
            yield counting
        finally:
            self.num_bytes -= num_counted

    def _check(self, more: int) -> None:
        """Raise OverloadedError if there is no room for `more` bytes."""
        if self.num_bytes + more > self._max_bytes:
            raise OverloadedError("the server is reading too many large requests")


def _counted(size: int) -> int:
    return max(size - UNCOUNTED_BYTES, 0)


def body_holder(
    http: Settings, memory: MutableMapping[str, Callable[[], int]]
) -> Callable[[Scope, Receive], AbstractContextManager[Receive]]:
    """Return the function that holds bodies within the limit in the settings. memory: gets a gauge of their bytes."""
    bodies = HeldBodies(http.of(BodySettings).max_body_memory_mb << 20)
    memory["body_bytes"] = lambda: bodies.num_bytes
    return bodies.hold
