"""The worker front's KvTransfer service: the engine's pool mapped read-only, its leases mirrored."""

from __future__ import annotations

from common.rpc import RpcServer
from kvstore.pool.leases import LeaseTable
from kvstore.transport.service import KvTransferService, PoolView
from kvstore.transport.staging import StagingTable
from protos import kvstore_pb2, kvstore_pb2_grpc
from worker.engine_client import EngineClient
from worker.messages import Release, Renew, Stage

SERVICE_NAME = kvstore_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name


def add_kv_service(server: RpcServer, engine: EngineClient) -> tuple[LeaseTable, StagingTable | None]:
    """Serve the engine's pools; returns what the front keeps current. Raises UnavailableError, TransferError."""
    leases, ready = LeaseTable(engine.ready.info.epoch), engine.ready
    staging = StagingTable(lambda *part: engine.send(Stage(*part))) if ready.needs_staging else None
    servicer = KvTransferService(
        [PoolView(path, staging) for path in ready.shm_sockets],
        leases,
        on_renew=lambda *lease: engine.send(Renew(*lease)),
        on_release=lambda *lease: engine.send(Release(*lease)),
        nixl_memory=ready.nixl_memory,
    )
    server.add(kvstore_pb2_grpc.add_KvTransferServicer_to_server, servicer, SERVICE_NAME)
    return leases, staging
