"""One open Attach stream to a worker: its queue of commands, and its KV events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from kvstore.pool.index import PrefixIndex
from kvstore.types import BlockKey, WorkerId
from protos import types_pb2 as pb

logger = logging.getLogger(__name__)
CALL_TIMEOUT_SECONDS = 5.0


class WorkerStream:
    """Sends a link's commands. `WorkerConnection` makes one for each connection."""

    def __init__(self, stub: Any, metadata: Any, worker_id: str) -> None:
        self.commands: asyncio.Queue[pb.Command] = asyncio.Queue()  # not written yet
        self.stub = stub
        self.metadata = metadata
        self._worker_id = worker_id

    def send(self, command: pb.Command) -> None:
        """Queue a command; the stream keeps their order."""
        self.commands.put_nowait(command)

    async def fetch_snapshot(self) -> Sequence[pb.KvEvent]:
        """Fetch a snapshot as the first report of a second stream. Open requests stay on the first stream."""
        call = self.stub.Attach(metadata=self.metadata, timeout=CALL_TIMEOUT_SECONDS)
        try:
            report = await call.read()
            return [] if report is EOF else report.kv_events
        except grpc.aio.AioRpcError as error:
            logger.warning("no snapshot from worker %s: %s", self._worker_id, error.code().name)
            return []
        finally:
            call.cancel()


class IndexFeed:
    """Feeds the stream's KV events into the prefix index, in order. After a gap it fetches all keys again.

    The first event of a new stream is a snapshot.
    """

    def __init__(self, index: PrefixIndex, worker: WorkerId, stream: WorkerStream) -> None:
        self._index = index
        self._worker = worker
        self._stream = stream
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
        for event in await self._stream.fetch_snapshot():
            if event.HasField("snapshot") and self._is_open:
                self._replace(event)
