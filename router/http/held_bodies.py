"""How many bytes of request bodies the router holds, all requests together; what would be too much is refused.

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
        """One request's body. It is given up with the context."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self.num_bytes -= body.num_bytes

    def check(self, more: int) -> None:
        """Raises OverloadedError when so many bytes have no room."""
        if self.num_bytes + more > self._max_bytes:
            raise OverloadedError("the server is reading too many large requests")


class HeldBody:
    """Grows while a body arrives."""

    def __init__(self, bodies: HeldBodies) -> None:
        self._bodies = bodies
        self.num_bytes = 0  # that count

    def expect(self, size: int) -> None:
        """The client says how large the body will be: refuse now what has no room now. Raises OverloadedError."""
        self._bodies.check(_counted(size))

    def grow_to(self, size: int) -> None:
        """So many bytes are here. Raises OverloadedError when they have no room."""
        more = _counted(size) - self.num_bytes
        self._bodies.check(more)
        self._bodies.num_bytes += more
        self.num_bytes += more


def _counted(size: int) -> int:
    return max(size - UNCOUNTED_BYTES, 0)
