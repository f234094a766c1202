"""Bound on the bytes of request bodies that the router holds, all requests together; beyond it bodies are refused.

A body counts from its first byte until its request has its prompt's tokens. The first part of each does not: the
limit of connections bounds those, and ordinary requests pass while somebody sends large ones. Lives in one event
loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import OverloadedError

UNCOUNTED_BYTES = 64 << 10  # of each body: 128 MB for 2,048 connections


class HeldBodies:
    """The bodies of one router."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0  # held now, of those that count

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """Hold one request's body until the context ends."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self.num_bytes -= body.num_bytes

    def check(self, more: int) -> None:
        """Raise OverloadedError when there is no room for that many more bytes."""
        if self.num_bytes + more > self._max_bytes:
            raise OverloadedError("the server is reading too many large requests")


class HeldBody:
    """Grows while a body arrives."""

    def __init__(self, bodies: HeldBodies) -> None:
        self._bodies = bodies
        self.num_bytes = 0  # that count

    def expect(self, size: int) -> None:
        """Check a declared content length early. Raises OverloadedError when it has no room now."""
        self._bodies.check(_counted(size))

    def grow_to(self, size: int) -> None:
        """Count the bytes received so far. Raises OverloadedError when they have no room."""
        more = _counted(size) - self.num_bytes
        self._bodies.check(more)
        self._bodies.num_bytes += more
        self.num_bytes += more


def _counted(size: int) -> int:
    return max(size - UNCOUNTED_BYTES, 0)
