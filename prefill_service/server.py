"""The Prefill gRPC service over a worker's front."""

from __future__ import annotations

from collections.abc import AsyncIterator

from common.errors import MiniInferError
from common.rpc import Context, RpcServer, abort_with
from engine.worker.front import WorkerFront
from protos import prefill_pb2, prefill_pb2_grpc
from protos import types_pb2 as pb


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):  # type: ignore[misc]
    """Thin: everything happens in the front and its rank."""

    def __init__(self, front: WorkerFront) -> None:
        self._front = front

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.WorkerInfo:
        return self._front.info

    async def Attach(self, commands: AsyncIterator[pb.Command], context: Context) -> AsyncIterator[pb.StepReport]:
        try:
            async for report in self._front.attach(commands, prefill_only=True):
                yield report
        except MiniInferError as error:
            await abort_with(context, error)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        self._front.drain(request.grace_seconds)
        return pb.DrainReply(num_open_requests=self._front.num_open_requests)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainReply:
        try:
            self._front.undrain()
        except MiniInferError as error:
            await abort_with(context, error)
        return pb.UndrainReply()


def register(server: RpcServer, front: WorkerFront) -> None:
    name = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name
    server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, PrefillServicer(front), name)
