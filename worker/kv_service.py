"""The worker front's KvTransfer service: the engine's pool mapped read-only, its leases mirrored."""

from __future__ import annotations

from dataclasses import dataclass

from common.rpc import RpcServer
from kvstore.pool.leases import LeaseMirror
from kvstore.transport.service import KvTransferService, PoolView
from kvstore.transport.staging import StagingTable
from kvstore.types import Epoch
from protos import kvstore_pb2, kvstore_pb2_grpc
from worker.engine_client import EngineClient

SERVICE_NAME = kvstore_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name


@dataclass(frozen=True)
class KvService:
    """What the front keeps of its engine's KV."""

    leases: LeaseMirror
    staging: StagingTable | None
    servicer: KvTransferService

    def register(self, server: RpcServer) -> None:
        server.add(kvstore_pb2_grpc.add_KvTransferServicer_to_server, self.servicer, SERVICE_NAME)


def open_kv_service(engine: EngineClient) -> KvService:
    """Map the engine's pools. Raises UnavailableError, TransferError."""

    leases = LeaseMirror(Epoch(engine.ready["epoch"]))
    staging = StagingTable(engine.stage) if engine.ready["needs_staging"] else None
    views = [PoolView(path, staging) for path in engine.ready["shm_sockets"]]
    servicer = KvTransferService(views, leases, engine.renew, engine.release)
    return KvService(leases, staging, servicer)
