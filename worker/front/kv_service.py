"""The worker front's KvTransfer service: a read-only descriptor of the engine's pool, its leases mirrored."""

from __future__ import annotations

from common.net.rpc import RpcServer
from common.wings import has_wing
from kvstore.pool.leases import LeaseTable
from kvstore.transports.service import BlockSender, KvTransferService, PoolView
from kvstore.transports.staging import StagingTable
from protos import kvstore_pb2, kvstore_pb2_grpc
from worker.config import WorkerConfig
from worker.front.engine_client import EngineClient
from worker.messages import Release, Renew, Stage

SERVICE_NAME = kvstore_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name


def add_kv_service(
    server: RpcServer, engine: EngineClient, worker: WorkerConfig
) -> tuple[LeaseTable, StagingTable | None, BlockSender | None]:
    """Serve the engine's pools; returns what the front keeps current, and closes.

    Raises ConfigError, UnavailableError, TransferError.
    """
    leases, ready = LeaseTable(engine.ready.info.epoch), engine.ready
    staging = StagingTable(lambda *part: engine.send(Stage(*part))) if ready.needs_staging else None
    sender = _open_sender(worker)
    servicer = KvTransferService(
        [PoolView(path, staging) for path in ready.shm_sockets],
        sender,
        leases,
        on_renew=lambda *lease: engine.send(Renew(*lease)),
        on_release=lambda *lease: engine.send(Release(*lease)),
        descriptions=ready.descriptions,
    )
    server.add(kvstore_pb2_grpc.add_KvTransferServicer_to_server, servicer, SERVICE_NAME)
    return leases, staging, sender


def _open_sender(worker: WorkerConfig) -> BlockSender | None:
    """What sends blocks by TCP, where that wing is there."""
    if not has_wing("worker.tcp"):
        return None
    from worker.tcp.sender import open_sender

    return open_sender(worker)
