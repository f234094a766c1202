"""The server that sends a worker's blocks."""

from __future__ import annotations

from kvstore.transports.tcp.block_server import BlockServer
from worker.config import WorkerConfig
from worker.tcp.settings import TcpSettings


def open_sender(worker: WorkerConfig) -> BlockServer:
    """Listen. Raises ConfigError."""
    return BlockServer(worker.host, worker.of(TcpSettings).kv_port)
