"""`cuda_ipc`: GPU memory of the same host, mapped and read by one kernel per pull."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.transports.cuda_ipc.held_server import HeldServer
from kvstore.transports.cuda_ipc.reader import NAME, CudaIpcReader
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.transport import LocalPool, Transport
from worker.cuda_ipc.mapped_pulls import MappedPulls
from worker.gpu_hand_off.rank_pool import DeviceRankPool


class CudaIpcTransport(Transport):
    """The address is the Unix socket that hands out a descriptor of the pool in GPU memory."""

    name = NAME
    needs = "GPU memory that processes can share: choose auto, shm or tcp"

    def __init__(self, host: str, token: str) -> None:
        super().__init__(host, token)
        self._servers: list[HeldServer] = []

    def reader(self, pool: LocalPool, leases: LeaseClient) -> CudaIpcReader | None:
        if not isinstance(pool, DeviceRankPool) or pool.device_fd is None:
            return None
        return CudaIpcReader(MappedPulls(pool.device))

    def export(self, pool: LocalPool) -> bytes | None:
        if not isinstance(pool, DeviceRankPool) or pool.device_fd is None:
            return None
        path = Path(pool.socket_path).with_suffix(".cuda.sock")
        self._servers.append(HeldServer(path, pool.info, os.dup(pool.device_fd)))
        return os.fsencode(path)

    def close(self) -> None:
        for server in self._servers:
            server.close()
