"""One open Attach stream to a worker: commands in their order, and the calls that are made beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from common.errors import UnavailableError
from protos import types_pb2 as pb

logger = logging.getLogger(__name__)
CALL_TIMEOUT_SECONDS = 5.0


class WorkerStream:
    """What a link sends through. `WorkerConnection` opens one whenever the worker is there."""

    def __init__(self, stub: Any, metadata: Any, worker_id: str) -> None:
        self.commands: asyncio.Queue[pb.Command] = asyncio.Queue()  # that are not written yet
        self._stub = stub
        self._metadata = metadata
        self._worker_id = worker_id

    def send(self, command: pb.Command) -> None:
        """Queue for the stream, in order."""
        self.commands.put_nowait(command)

    async def fetch_snapshot(self) -> Sequence[pb.KvEvent]:
        """A second stream, whose first report is a snapshot. Open requests stay on the first one."""
        call = self._stub.Attach(metadata=self._metadata, timeout=CALL_TIMEOUT_SECONDS)
        try:
            report = await call.read()
            return [] if report is EOF else report.kv_events
        except grpc.aio.AioRpcError as error:
            logger.warning("no snapshot from worker %s: %s", self._worker_id, error.code().name)
            return []
        finally:
            call.cancel()

    async def ask(self, method: str, request: Any, refusal: str) -> Any:
        """Call a method of the worker's service; its reply. Raises UnavailableError, which says `refusal`."""
        try:
            return await getattr(self._stub, method)(request, timeout=CALL_TIMEOUT_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"worker {self._worker_id} {refusal}: {error.code().name}") from None
