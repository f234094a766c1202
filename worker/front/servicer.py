"""The gRPC service of a worker, for either role. Thin: everything happens in the front and its engine process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from common.errors import MiniInferError
from common.net.rpc import Context, RpcServer, abort_with
from protos import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from protos import types_pb2 as pb
from worker.front.front import WorkerFront


class WorkerServicer:
    """Methods of both services. A worker of either role computes prompts and generates, as each Submit says."""

    def __init__(self, front: WorkerFront) -> None:
        self._front = front

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.WorkerInfo:
        return self._front.info

    async def Attach(self, commands: AsyncIterator[pb.Command], context: Context) -> AsyncIterator[pb.StepReport]:
        try:
            async for report in self._front.attach(commands):
                yield report
        except MiniInferError as error:
            await abort_with(context, error)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        drain = self._front.drain
        drain.start(request.grace_seconds, time.monotonic())
        return pb.DrainReply(num_open_requests=self._front.num_open_requests, num_drain_changes=drain.num_changes)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainReply:
        try:
            self._front.drain.undo()
        except MiniInferError as error:
            await abort_with(context, error)
        return pb.UndrainReply(num_drain_changes=self._front.drain.num_changes)


def register(role: str, server: RpcServer, front: WorkerFront) -> None:
    """Add the service of `role` to the server."""
    servicer = WorkerServicer(front)
    if role == "prefill":
        name = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name
        server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, servicer, name)
    else:
        name = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name
        server.add(decode_pb2_grpc.add_DecodeServicer_to_server, servicer, name)
