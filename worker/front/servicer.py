"""The gRPC services of a worker: Prefill or Decode for routers, KvTransfer for peers.

They only forward calls to the front and its engine process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from common.errors import MiniInferError
from common.net.rpc import Context, RpcServer, abort_with
from common.wings import from_wing
from kvstore.transports.kv_transfer import KvTransferService
from protos import decode_pb2, decode_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from protos import types_pb2 as pb
from worker.config import WorkerConfig
from worker.front.engine_client import EngineClient
from worker.front.front import WorkerFront
from worker.messages import Renew, Stage


class WorkerServicer(prefill_pb2_grpc.PrefillServicer):  # type: ignore[misc]
    """Implements both services, Prefill and Decode, whose methods are the same; wings add further methods.

    A worker of either role can compute prompts and decode, as each Submit says.
    """

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


def register(role: str, server: RpcServer, servicer: WorkerServicer) -> None:
    """Add the service of `role` to the server."""
    if role == "prefill":
        name = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name
        server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, servicer, name)
    else:
        name = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name
        server.add(decode_pb2_grpc.add_DecodeServicer_to_server, servicer, name)


def add_kv_service(
    server: RpcServer, engine: EngineClient, worker: WorkerConfig, front: WorkerFront
) -> KvTransferService:  # fmt: skip
    """Serve the engine's leases, which the front mirrors.

    Raises ConfigError, UnavailableError, TransferError.
    """
    ready = engine.ready
    sending_service = from_wing("worker.tcp.sender:sending_service")
    service = sending_service(worker, ready.shm_sockets) if sending_service else KvTransferService
    servicer = service(
        leases=front.leases,
        on_renew=lambda *lease: engine.send(Renew(*lease)),
        on_release=lambda lease_id, epoch: front.release(pb.Release(lease_id=lease_id, epoch=epoch)),
        descriptions=ready.descriptions,
    )
    if ready.needs_staging:
        staging = from_wing("worker.gpu_hand_off.staging_table:StagingTable")(lambda *part: engine.send(Stage(*part)))
        servicer.stage = staging.rows
        front.listeners.append(staging.apply)
    name = kvstore_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name
    server.add(kvstore_pb2_grpc.add_KvTransferServicer_to_server, servicer, name)
    return servicer
