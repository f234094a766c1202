"""`nccl`: KV in GPU memory that cannot be mapped is sent through a communicator of two pools."""

from __future__ import annotations

from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.nccl.reader import NAME, NcclReader
from kvstore.transports.nccl.server import NcclServer
from kvstore.transports.transport import LeaseHolder, LocalPool, Transport
from worker.nccl.pool import NcclPool, open_nccl


class NcclTransport(Transport):
    """The address is the port of the owner's process, on its service's host, and the UUID of the pool's GPU."""

    name = NAME
    offered = "auto"
    needs = "a GPU and libnccl.so.2, which torch's packages for CUDA bring: choose auto"

    def __init__(self, host: str, token: str) -> None:
        super().__init__(host, token)
        self._pools: dict[LocalPool, NcclPool | None] = {}
        self._server: NcclServer | None = None

    def reader(self, pool: LocalPool, leases: LeaseClient) -> NcclReader | None:
        opened = self._opened(pool)
        return None if opened is None else NcclReader(opened, self.token)

    def export(self, pool: LocalPool) -> bytes | None:
        opened = self._opened(pool)
        if opened is None:
            return None
        if self._server is None:
            self._server = NcclServer(self.host, self.token, pool.info.worker_id, pool.info.epoch)
        self._server.add(opened, pool.info.geometry.block_bytes)
        return f"{self._server.port} {opened.gpu}".encode()

    def serve(self, leases: LeaseHolder) -> None:
        if self._server is not None:
            self._server.serve(leases)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _opened(self, pool: LocalPool) -> NcclPool | None:
        if pool not in self._pools:
            self._pools[pool] = open_nccl(pool)
        return self._pools[pool]
