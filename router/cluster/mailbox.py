"""Where a worker link leaves what arrives for one attempt, and one task waits for it.

One `put` per step and request, and one wake-up for everything that has come since the last. A `shortcut` may take
a delta at once, without waking anybody: it is offered only what comes while the reader has nothing else to do, so
the order stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.errors import EngineError, MiniInferError
from protos import types_pb2 as pb


class Mailbox:
    """Single reader. An error ends it: `take` raises it after what came before has been taken."""

    __slots__ = ("_deltas", "_error", "_loop", "_waiter", "shortcut")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deltas: list[pb.TokenDelta] = []
        self._error: MiniInferError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.shortcut: Callable[[pb.TokenDelta], bool] | None = None

    def put(self, delta: pb.TokenDelta) -> None:
        if self._waiter is None:
            self._deltas.append(delta)
        elif self.shortcut is None or self._waiter.done() or not self._is_taken(self.shortcut, delta):
            self._deltas.append(delta)
            self._wake()

    def fail(self, error: MiniInferError) -> None:
        """End the mailbox; the first error counts."""
        if self._error is None:
            self._error = error
        if self._waiter is not None:
            self._wake()

    async def take(self) -> list[pb.TokenDelta]:
        """All deltas that have come, at least one. Raises the error that ended it."""
        if not self._deltas:
            if self._error is None:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            if not self._deltas:
                assert self._error is not None  # only `put` and `fail` wake the reader
                raise self._error
        deltas, self._deltas = self._deltas, []
        return deltas

    def close(self) -> list[pb.TokenDelta]:
        """What has come and was not taken; the reader has gone."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _is_taken(self, shortcut: Callable[[pb.TokenDelta], bool], delta: pb.TokenDelta) -> bool:
        try:
            return shortcut(delta)
        except Exception as error:  # noqa: BLE001 - a bug in showing one request must not end the link, which carries all of them
            failure = EngineError("internal error")
            failure.__cause__ = error  # for whoever logs the failure with the request's id
            self.fail(failure)
            return True

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
