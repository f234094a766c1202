"""The service that sends a worker's blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvstore.transports.kv_transfer import KvTransferService
from kvstore.transports.tcp.block_server import BlockServer
from kvstore.transports.tcp.service import PoolView, TcpTransferService
from worker.config import WorkerConfig
from worker.tcp.settings import TcpSettings


def sending_service(worker: WorkerConfig, shm_sockets: Sequence[str]) -> Callable[..., KvTransferService]:
    """Listen, and return a function that makes the service from KvTransferService's arguments.

    shm_sockets: sockets that hand out descriptors of all ranks' pools. Raises ConfigError, UnavailableError,
    TransferError.
    """
    sender = BlockServer(worker.host, worker.of(TcpSettings).kv_port)
    return partial(TcpTransferService, sender=sender, pools=[PoolView(path) for path in shm_sockets])
