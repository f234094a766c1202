"""The worker front's KvTransfer service: the rank's pool mapped read-only, its leases and cache events mirrored."""

from __future__ import annotations

from dataclasses import dataclass

from common.rpc import RpcServer
from engine.worker.rank_process import RankProcess
from kvstore.events import EventLog
from kvstore.leases import LeaseMirror
from kvstore.service import KvTransferService, PoolView
from kvstore.staging import StagingDesk
from kvstore.types import Epoch, LeaseId
from protos import kvstore_pb2, kvstore_pb2_grpc

SERVICE_NAME = kvstore_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name


@dataclass(frozen=True)
class KvService:
    """What the front keeps of its rank's KV."""

    events: EventLog
    leases: LeaseMirror
    staging: StagingDesk | None
    servicer: KvTransferService

    def register(self, server: RpcServer) -> None:
        server.add(kvstore_pb2_grpc.add_KvTransferServicer_to_server, self.servicer, SERVICE_NAME)


def open_kv_service(rank: RankProcess) -> KvService:
    """Map the rank's pool. Raises UnavailableError, TransferError."""

    async def on_renew(lease_id: LeaseId, epoch: Epoch, lease_seconds: float) -> None:
        rank.renew(lease_id, epoch, lease_seconds)

    async def on_release(lease_id: LeaseId, epoch: Epoch) -> None:
        rank.release(lease_id, epoch)

    events = EventLog()
    leases = LeaseMirror(Epoch(rank.ready["epoch"]))
    view = PoolView.fetch(rank.ready["shm_socket"])
    staging = StagingDesk(rank.stage) if rank.ready["needs_staging"] else None
    servicer = KvTransferService(view, leases, events, on_renew, on_release, staging)
    return KvService(events, leases, staging, servicer)
