"""`tcp`: blocks over plain connections, from the owner's front."""

from __future__ import annotations

from kvstore.transports.lease_client import LeaseClient
from kvstore.transports.tcp.reader import TcpReader
from kvstore.transports.transport import LocalPool, Reader, Transport


class TcpTransport(Transport):
    """An address is empty: the service that grants reads is the one that renews leases."""

    name = "tcp"

    def reader(self, pool: LocalPool, leases: LeaseClient) -> Reader:
        return pool.through_host(TcpReader(pool.host_blocks, leases))

    def export(self, pool: LocalPool) -> bytes:
        return b""
