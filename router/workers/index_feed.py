"""Feed of one worker's KV events into the prefix index.

Lives as long as one connection: a worker that comes back begins with a snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from kvstore.pool.index import PrefixIndex
from kvstore.types import BlockKey, WorkerId
from protos import types_pb2 as pb

logger = logging.getLogger(__name__)
FetchSnapshot = Callable[[], Awaitable[Sequence[pb.KvEvent]]]


class IndexFeed:
    """Applies events in order. After a gap it asks `fetch_snapshot` for all keys again."""

    def __init__(self, index: PrefixIndex, worker: WorkerId, fetch_snapshot: FetchSnapshot) -> None:
        self._index = index
        self._worker = worker
        self._fetch_snapshot = fetch_snapshot
        self._resync: asyncio.Task[None] | None = None
        self._is_open = True

    def apply(self, events: Iterable[pb.KvEvent]) -> None:
        is_complete = True
        for event in events:
            kind = event.WhichOneof("kind")
            if kind == "snapshot":
                self._replace(event)
                is_complete = True
            elif kind == "stored":
                is_complete = self._index.apply(self._worker, event.sequence, stored=map(BlockKey, event.stored.keys))
            elif kind == "removed":
                keys = map(BlockKey, event.removed.keys)
                is_complete = self._index.apply(self._worker, event.sequence, removed=keys)
        if not is_complete and (self._resync is None or self._resync.done()):
            self._resync = asyncio.create_task(self._mend())

    def close(self) -> None:
        """Forget the worker."""
        self._is_open = False
        self._index.remove_worker(self._worker)

    def _replace(self, event: pb.KvEvent) -> None:
        self._index.snapshot(self._worker, event.sequence, [BlockKey(key) for key in event.snapshot.keys])

    async def _mend(self) -> None:
        logger.warning("events of worker %s have a gap: fetching a snapshot", self._worker)
        for event in await self._fetch_snapshot():
            if event.HasField("snapshot") and self._is_open:
                self._replace(event)
