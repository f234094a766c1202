"""Reads a peer's lease over TCP: works everywhere, at the cost of copies on both sides.

The KvTransfer service grants a read. Blocks come over plain connections and are received in place. A long pull is
divided among several connections, each with a thread that also computes digests, as a core copies a few GB per
second.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise

from common.errors import TransferError
from kvstore.handle.handle import PeerShard
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.sockets import has_gone
from kvstore.transports.transport import BlockPull, Blocks, LocalPool, Reader, Transport, pull_parts
from kvstore.types import runs_of
from protos import kvstore_pb2

MAX_STREAMS = 4  # of a pull
MIN_STREAM_BYTES = 4 << 20
MAX_IDLE = 64  # connections
CONNECT_SECONDS = 5.0
WAIT_SECONDS = 1  # between two checks of the deadline
Address = tuple[str, int]


def ticket_for(
    client: LeaseClient, shard: PeerShard, positions: Sequence[int], deadline_seconds: float
) -> tuple[bytes, int]:
    """Request blocks of the lease; return the ticket, and the port where it is valid.

    Raises UnavailableError, or TransferError if the peer refuses.
    """
    request = kvstore_pb2.ReadRequest(
        lease_id=shard.lease_id, epoch=shard.epoch, positions=positions, rank=shard.rank
    )
    reply = client.call(shard.address.kv_address, "Read", request, deadline_seconds)
    return reply.ticket, reply.port


class TcpReader:
    """Safe to use from several threads; the caller closes `client`."""

    def __init__(self, pool: Blocks, client: LeaseClient) -> None:
        """pool: the target of pulls."""
        self._pool = pool
        self._client = client
        self._connections = Connections()
        self._num_streams = min(MAX_STREAMS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(2 * MAX_STREAMS, "kv-tcp")

    def pull(self, pull: BlockPull) -> list[list[int]]:
        num_bytes = len(pull.positions) * self._pool.shape[1]
        slices = sliced(pull, min(self._num_streams, num_bytes // MIN_STREAM_BYTES))
        others = [self._threads.submit(pull_parts, self._read, each, self._pool) for each in slices[1:]]
        try:
            digests = pull_parts(self._read, slices[0], self._pool)
        finally:
            wait(others)  # also after a failure: nothing may be written to the blocks afterwards
        for other in others:
            for own, more in zip(digests, other.result(), strict=True):
                own += more
        return digests

    def _read(
        self, shard: PeerShard, positions: Sequence[int], blocks: Blocks, rows: Sequence[int], deadline_seconds: float
    ) -> None:
        if not positions:
            return
        deadline = time.monotonic() + deadline_seconds
        ticket, port = ticket_for(self._client, shard, positions, deadline_seconds)
        address = shard.address.kv_address.rpartition(":")[0].strip("[]"), port
        try:
            connection = self._connections.take(address)
        except OSError as error:
            raise TransferError(f"cannot connect to {address[0]}:{port} for KV blocks: {error}") from error
        try:
            connection.sendall(ticket)
            receive_blocks(connection, blocks, rows, deadline)
        except OSError as error:
            self._connections.drop(connection)
            raise TransferError(f"the connection for KV blocks failed: {error}") from error
        except BaseException:  # Ctrl-C, too
            self._connections.drop(connection)  # it still contains bytes of this read
            raise
        self._connections.give(address, connection)

    def close(self) -> None:
        """End all pulls, even in progress."""
        self._connections.close()
        self._threads.shutdown()


class Connections:
    """Connections to peers, used and idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[Address, socket.socket]] = []
        self._used: set[socket.socket] = set()
        self._closed = False

    def take(self, address: Address) -> socket.socket:
        """Return an idle connection, or a new one. Raises OSError."""
        with self._lock:
            known = [pair for pair in self._idle if pair[0] == address]
            self._idle = [pair for pair in self._idle if pair[0] != address] + known[:-1]
        if known and not has_gone(known[-1][1]):
            connection = known[-1][1]
        else:
            if known:
                known[-1][1].close()
            connection = socket.create_connection(address, CONNECT_SECONDS)
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", WAIT_SECONDS, 0))
        with self._lock:
            if self._closed:
                connection.close()
                raise OSError("no more reads: this worker ends")
            self._used.add(connection)
        return connection

    def give(self, address: Address, connection: socket.socket) -> None:
        """Keep a connection for the next read; beyond MAX_IDLE the oldest is closed."""
        with self._lock:
            self._used.discard(connection)
            self._idle.append((address, connection))
            if len(self._idle) > MAX_IDLE or self._closed:
                self._idle.pop(0)[1].close()

    def drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._used.discard(connection)
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop()[1].close()
            for connection in self._used:  # the readers close them
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def sliced(pull: BlockPull, count: int) -> list[BlockPull]:
    """Divide the pull into `count` parts with about equally many blocks; at least one part."""
    total = len(pull.positions)
    bounds = [total * index // max(count, 1) for index in range(max(count, 1) + 1)]
    return [
        replace(pull, positions=pull.positions[first:stop], local_block_ids=pull.local_block_ids[first:stop])
        for first, stop in pairwise(bounds)
    ]


def receive_blocks(connection: socket.socket, blocks: Blocks, rows: Sequence[int], deadline: float) -> None:
    """Fill rows with received bytes. Raises OSError, or TransferError at the deadline or the connection's end."""
    for _, row, count in runs_of(rows):
        wanted = memoryview(blocks[row : row + count].reshape(-1).data)
        while wanted:
            if time.monotonic() > deadline:
                raise TransferError("the peer did not send its KV blocks in time")
            try:
                received = connection.recv_into(wanted, 0, socket.MSG_WAITALL)
            except BlockingIOError:  # nothing came for WAIT_SECONDS
                continue
            if not received:
                raise TransferError("the peer ended a read of KV blocks")
            wanted = wanted[received:]


class TcpTransport(Transport):
    """The address is empty, since the service that grants reads is the one that renews leases."""

    name = "tcp"

    def reader(self, pool: LocalPool, leases: LeaseClient) -> Reader:
        return pool.through_host(TcpReader(pool.host_blocks, leases))

    def export(self, pool: LocalPool) -> bytes:
        return b""
