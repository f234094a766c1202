"""The calls with which an operator drains a worker, and undoes it."""

from __future__ import annotations

import time

from common.errors import MiniInferError
from common.net.rpc import Context, abort_with
from protos import types_pb2 as pb
from worker.drains.drain import Drain
from worker.front.front import WorkerFront
from worker.front.servicer import WorkerServicer


class DrainServicer(WorkerServicer):
    """All methods of both services."""

    def __init__(self, front: WorkerFront) -> None:
        super().__init__(front)
        assert isinstance(front.drain, Drain)
        self._drain = front.drain

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        self._drain.start(request.grace_seconds, time.monotonic())
        num_changes = self._drain.num_changes
        return pb.DrainReply(num_open_requests=self._front.num_open_requests, num_drain_changes=num_changes)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainReply:
        try:
            self._drain.undo()
        except MiniInferError as error:
            await abort_with(context, error)
        return pb.UndrainReply(num_drain_changes=self._drain.num_changes)
