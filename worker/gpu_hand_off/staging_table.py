"""The front's side of staging leases from GPU memory to rows of shared memory: the engine is asked once for each.

Rows belong to a lease until it ends. Belongs to one event loop; handles no bytes.
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
    """`ask(lease_id, first)` makes the engine stage a lease from position `first` on; its reports contain the
    answers."""

    def __init__(self, ask: Callable[[LeaseId, int], None]) -> None:
        self._ask = ask
        self._rows: defaultdict[LeaseId, dict[int, asyncio.Future[list[BlockId]]]] = defaultdict(dict)  # by first

    async def rows(self, lease_id: LeaseId, first: int) -> list[BlockId]:
        """Return the rows of the lease's blocks from position `first` on, in order. Raises TransferError."""
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
        """Process the answers and ended leases in a report of the engine process."""
        for lease_id, first, rows in report.staged:
            self.answer(lease_id, first, rows)
        for lease_id in report.ended_leases:
            self.end(lease_id)

    def answer(self, lease_id: LeaseId, first: int, rows: Sequence[int] | None) -> None:
        """Record that the engine has staged the lease from `first` on; rows None: no room, or no such lease."""
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
        """Drop the rows of a lease that has ended."""
        for future in self._rows.pop(lease_id, {}).values():
            if not future.done():
                _fail(future, "the lease has ended")


def _fail(future: asyncio.Future[list[BlockId]], message: str) -> None:
    future.set_exception(TransferError(message))
    future.exception()  # mark it as retrieved, as there may be no waiter left
