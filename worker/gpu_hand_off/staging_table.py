"""Staging of leases from GPU memory to rows of shared memory, on the front's side: the engine is asked once.

Rows belong to a lease until it ends. Lives in one event loop; knows no bytes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from common.errors import TransferError
from kvstore.types import BlockId, LeaseId
from worker.messages import StepReport

STAGE_SECONDS = 10.0


class StagingTable:
    """`ask(lease_id, first)` makes the engine stage a lease from position `first` on; its reports bring answers."""

    def __init__(self, ask: Callable[[LeaseId, int], None]) -> None:
        self._ask = ask
        self._rows: defaultdict[LeaseId, dict[int, asyncio.Future[list[BlockId]]]] = defaultdict(dict)  # by first

    async def rows(self, lease_id: LeaseId, first: int) -> list[BlockId]:
        """The rows that hold the lease's blocks from position `first` on, in its order. Raises TransferError."""
        staged = self._rows[lease_id]
        start = max((known for known in staged if known <= first), default=None)
        if start is None:
            start = first
            staged[start] = asyncio.get_running_loop().create_future()
            self._ask(lease_id, start)
        try:
            return (await asyncio.wait_for(asyncio.shield(staged[start]), STAGE_SECONDS))[first - start :]
        except TimeoutError:
            raise TransferError("the worker does not bring the KV blocks to shared memory") from None

    def apply(self, report: StepReport) -> None:
        """Take the answers, and the ends of leases, of a report of the engine process."""
        for lease_id, first, rows in report.staged:
            self.answer(lease_id, first, rows)
        for lease_id in report.ended_leases:
            self.end(lease_id)

    def answer(self, lease_id: LeaseId, first: int, rows: Sequence[int] | None) -> None:
        """The engine has staged the lease from `first` on; None: it has no room, or no such lease."""
        future = self._rows[lease_id].get(first) if lease_id in self._rows else None
        if future is None or future.done():
            return
        if rows is not None:
            future.set_result([BlockId(row) for row in rows])
            return
        del self._rows[lease_id][first]  # the next reader may find room
        if not self._rows[lease_id]:
            del self._rows[lease_id]  # its end may have been reported already
        _fail(future, "the worker has no room to bring the KV blocks to shared memory")

    def end(self, lease_id: LeaseId) -> None:
        """The lease has ended, and its rows with it."""
        for future in self._rows.pop(lease_id, {}).values():
            if not future.done():
                _fail(future, "the lease has ended")


def _fail(future: asyncio.Future[list[BlockId]], message: str) -> None:
    future.set_exception(TransferError(message))
    future.exception()  # retrieve it: there may be no waiter left
