"""The worker front's KvTransfer service: the engine's pool mapped read-only, its leases and cache events mirrored."""

from __future__ import annotations

from dataclasses import dataclass

from common.rpc import RpcServer
from kvstore.pool.events import EventLog
from kvstore.pool.leases import LeaseMirror
from kvstore.transport.service import KvTransferService, PoolView
from kvstore.transport.staging import StagingTable
from kvstore.types import Epoch, LeaseId
from protos import kvstore_pb2, kvstore_pb2_grpc
from worker.engine_client import EngineClient

SERVICE_NAME = kvstore_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name


@dataclass(frozen=True)
class KvService:
    """What the front keeps of its engine's KV."""

    events: EventLog
    leases: LeaseMirror
    staging: StagingTable | None
    servicer: KvTransferService

    def register(self, server: RpcServer) -> None:
        server.add(kvstore_pb2_grpc.add_KvTransferServicer_to_server, self.servicer, SERVICE_NAME)


def open_kv_service(engine: EngineClient) -> KvService:
    """Map the engine's pools. Raises UnavailableError, TransferError."""

    async def on_renew(lease_id: LeaseId, epoch: Epoch, lease_seconds: float) -> None:
        engine.renew(lease_id, epoch, lease_seconds)

    async def on_release(lease_id: LeaseId, epoch: Epoch) -> None:
        engine.release(lease_id, epoch)

    events = EventLog()
    leases = LeaseMirror(Epoch(engine.ready["epoch"]))
    staging = StagingTable(engine.stage) if engine.ready["needs_staging"] else None
    views = [PoolView.fetch(path, staging) for path in engine.ready["shm_sockets"]]
    servicer = KvTransferService(views, leases, on_renew, on_release)
    return KvService(events, leases, staging, servicer)
