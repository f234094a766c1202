"""`shm`: host memory of the same host is mapped and read in place."""

from __future__ import annotations

from kvstore.transports.lease_client import LeaseClient
from kvstore.transports.shm.reader import NAME, DeviceShmReader, ShmReader
from kvstore.transports.transport import LocalPool, Reader, Transport


class ShmTransport(Transport):
    """An address is the Unix socket that hands out a descriptor of the memory."""

    name = NAME

    def reader(self, pool: LocalPool, leases: LeaseClient) -> Reader:
        reader = pool.through_host(ShmReader(pool.host_blocks, leases))
        return reader if pool.device is None else DeviceShmReader(pool.device, reader, leases)

    def export(self, pool: LocalPool) -> bytes:
        return pool.socket_path.encode()
