"""Staging of leases from GPU memory to rows of shared memory, on the front's side: the engine is asked once.

Rows belong to a lease until it ends. Lives in one event loop; knows no bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.errors import TransferError
from kvstore.types import BlockId, LeaseId

STAGE_SECONDS = 10.0


class StagingTable:
    """`ask(lease_id)` makes the engine stage a lease; its answer comes as `answer`."""

    def __init__(self, ask: Callable[[LeaseId], None]) -> None:
        self._ask = ask
        self._rows: dict[LeaseId, asyncio.Future[list[BlockId]]] = {}

    async def rows(self, lease_id: LeaseId) -> list[BlockId]:
        """The rows that hold the lease's blocks, in its order. Raises TransferError."""
        future = self._rows.get(lease_id)
        if future is None:
            future = self._rows[lease_id] = asyncio.get_running_loop().create_future()
            self._ask(lease_id)
        try:
            return await asyncio.wait_for(asyncio.shield(future), STAGE_SECONDS)
        except TimeoutError:
            raise TransferError("the worker does not bring the KV blocks to shared memory") from None

    def answer(self, lease_id: LeaseId, rows: Sequence[int] | None) -> None:
        """The engine has staged the lease; None: it has no room, or no such lease."""
        future = self._rows.get(lease_id)
        if future is None or future.done():
            return
        if rows is not None:
            future.set_result([BlockId(row) for row in rows])
            return
        del self._rows[lease_id]  # the next reader may find room
        _fail(future, "the worker has no room to bring the KV blocks to shared memory")

    def end(self, lease_id: LeaseId) -> None:
        """The lease has ended, and its rows with it."""
        future = self._rows.pop(lease_id, None)
        if future is not None and not future.done():
            _fail(future, "the lease has ended")


def _fail(future: asyncio.Future[list[BlockId]], message: str) -> None:
    future.set_exception(TransferError(message))
    future.exception()  # retrieve it: there may be no waiter left
