"""Blocks of a worker by TCP: the KvTransfer service's grants, and the bytes that arrive."""

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from common.errors import HandshakeError, TransferError, UnavailableError
from common.net.rpc import open_channel, token_metadata
from kvstore.layout import full_attention
from kvstore.transports.client import KvClient
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.sockets import has_gone
from kvstore.transports.staged_rows import stage
from kvstore.transports.tcp import block_server
from kvstore.transports.tcp import reader as tcp
from kvstore.transports.tcp.reader import ticket_for
from kvstore.types import Epoch, LeaseId
from protos import kvstore_pb2, kvstore_pb2_grpc
from tests.harness.waiting import wait_until
from tests.kvstore.front import Worker
from tests.kvstore.helpers import GEOMETRY, Owner, empty_pool, host_client, ids, with_address, with_shard
from worker.gpu_hand_off.staging_table import StagingTable

BLOCKS = [3, 4, 5, 1]
BIG = replace(GEOMETRY, layout=full_attention(1500, 2, 8, "float32"), num_blocks=3)  # blocks of 768 KB


async def test_a_long_pull_by_several_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MIN_STREAM_BYTES", BIG.block_bytes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    async with Worker(tmp_path, BIG) as worker:
        mine = empty_pool(BIG)
        client = host_client(BIG, mine, "secret")
        for _ in range(2):  # the second time by the same connections
            mine[:] = 0
            await asyncio.to_thread(client.pull, worker.lease([2, 0, 1]), [0, 1, 2], ids(0, 2, 1))
            np.testing.assert_array_equal(mine, worker.owner.blocks[[2, 1, 0]])
        client.close()


async def test_shm_is_preferred_and_tcp_takes_over(tmp_path: Path, client: KvClient) -> None:
    async with Worker(tmp_path) as worker:
        peer = with_address(worker.lease(BLOCKS), shm=worker.owner.socket)
        assert (await asyncio.to_thread(client.pull, peer, [0], ids(0))) == "shm"
        namesake = Owner(tmp_path, replace(GEOMETRY, fingerprint="x"), "namesake")  # same path, another host
        for path in ("/nowhere/x.sock", str(namesake.socket)):
            elsewhere = with_address(peer, shm=path)
            other = host_client(GEOMETRY, empty_pool(), "secret")
            assert (await asyncio.to_thread(other.pull, elsewhere, [0], ids(0))) == "tcp"
            other.close()
        namesake.close()


async def test_refusals(tmp_path: Path, client: KvClient) -> None:
    async with Worker(tmp_path) as worker:
        expired = worker.lease(BLOCKS, seconds=-1.0)
        with pytest.raises(TransferError, match="expired"):
            await asyncio.to_thread(client.pull, expired, [0], ids(0))
        peer = worker.lease(BLOCKS)
        for epoch in (1, worker.owner.epoch ^ 1):
            with pytest.raises(TransferError, match="epoch"):
                await asyncio.to_thread(client.pull, with_shard(peer, epoch=Epoch(epoch)), [0], ids(0))
        other = host_client(replace(GEOMETRY, fingerprint="x"), empty_pool(), "secret")
        with pytest.raises(HandshakeError, match="model"):
            await asyncio.to_thread(other.pull, peer, [0], ids(0))
        stranger = host_client(GEOMETRY, empty_pool())
        with pytest.raises(TransferError, match="token"):
            await asyncio.to_thread(stranger.pull, peer, [0], ids(0))
        other.close()
        stranger.close()
    leases = LeaseClient("secret")
    with pytest.raises(UnavailableError):
        await asyncio.to_thread(leases.release, peer)
    leases.close()


async def test_blocks_in_gpu_memory_are_read_from_the_rows_that_they_were_copied_to(
    tmp_path: Path, client: KvClient, mine: np.ndarray  # type: ignore[type-arg]
) -> None:  # fmt: skip
    asked: list[tuple[str, int]] = []

    def ask(lease_id: LeaseId, first: int) -> None:  # blocks 100 to 102 lie elsewhere; rows 6, 2, 3 get their bytes
        asked.append((lease_id, first))
        asyncio.get_running_loop().call_later(0.01, table.answer, lease_id, first, [6, 2, 3][first:])

    table = StagingTable(ask)
    async with Worker(tmp_path, stage=table.rows) as worker:
        worker.adopt([100, 101, 102])
        rows = worker.owner.peer([6, 2, 3], "lease", worker.server.address)
        peer = with_address(with_shard(rows, block_ids=tuple(ids(100, 101, 102))), needs_staging=True)
        for name, socket_path in (("shm", worker.owner.socket), ("tcp", None)):
            mine[:] = 0
            by = with_address(peer, shm=socket_path)
            assert (await asyncio.to_thread(client.pull, by, [2, 1], ids(4, 5))) == name
            np.testing.assert_array_equal(mine[[4, 5]], worker.owner.blocks[[3, 2]])
            assert (await asyncio.to_thread(client.pull, by, [2], ids(6))) == name
            np.testing.assert_array_equal(mine[6], worker.owner.blocks[3])
        assert asked == [("lease", 1)]  # what is not wanted is not staged, and the rest once
        await asyncio.to_thread(client.pull, by, [0], ids(4))
        np.testing.assert_array_equal(mine[4], worker.owner.blocks[6])
        assert asked[1:] == [("lease", 0)]
        leases = LeaseClient("secret")
        with pytest.raises(TransferError, match="outside the lease"):
            await asyncio.to_thread(stage, leases, peer.shards[0], 3, 60.0)
        leases.close()
        with pytest.raises(TransferError, match="epoch"):
            await asyncio.to_thread(client.pull, with_shard(by, epoch=Epoch(1)), [0], ids(0))


async def test_a_lease_that_ends_during_a_read_ends_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_server, "MAX_SENT", 1 << 16)
    async with Worker(tmp_path, BIG) as worker:
        peer = worker.lease([0, 1, 2] * 40)
        leases = LeaseClient("secret")
        ticket, port = await asyncio.to_thread(ticket_for, leases, peer.shards[0], range(120), 60.0)
        leases.close()
        with socket.create_connection(("127.0.0.1", port), 60.0) as connection:
            connection.sendall(ticket)
            received = len(await asyncio.to_thread(connection.recv, 1 << 16))
            worker.leases.release(LeaseId("lease"), worker.leases.epoch)
            while more := await asyncio.to_thread(connection.recv, 1 << 20):
                received += len(more)
        assert received < 120 * BIG.block_bytes


async def test_a_ticket_is_good_for_one_read(tmp_path: Path) -> None:
    async with Worker(tmp_path) as worker:
        peer = worker.lease(BLOCKS)
        leases = LeaseClient("secret")
        ticket, port = await asyncio.to_thread(ticket_for, leases, peer.shards[0], [1], 60.0)
        another, _ = await asyncio.to_thread(ticket_for, leases, peer.shards[0], [0], 60.0)
        for wrong in (b"\0" * 16, b"GET / HTTP/1.1\r\n\r\n", ticket[:5]):
            assert await asyncio.to_thread(answer_to, port, wrong) == b""
        assert await asyncio.to_thread(answer_to, port, ticket) == worker.owner.blocks[4].tobytes()
        assert await asyncio.to_thread(answer_to, port, ticket) == b""
        assert await asyncio.to_thread(answer_to, port, another) == worker.owner.blocks[3].tobytes()
        leases.close()


def answer_to(port: int, message: bytes) -> bytes:
    """Return the block server's answer, empty if it hung up.

    It may hang up before this side has written or shut its end, so any of the calls below may fail.
    """
    with socket.create_connection(("127.0.0.1", port), 60.0) as connection, contextlib.suppress(OSError):
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            return file.read()
    return b""


async def test_reads_are_bounded(tmp_path: Path) -> None:
    async with Worker(tmp_path) as worker, open_channel(worker.server.address) as channel:
        worker.lease(BLOCKS)
        stub = kvstore_pb2_grpc.KvTransferStub(channel)
        for positions, code in (([0] * 70_000, "INVALID_ARGUMENT"), ([4], "ABORTED"), ([2**32 - 1], "ABORTED")):
            request = kvstore_pb2.ReadRequest(lease_id="lease", epoch=worker.owner.epoch, positions=positions)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Read(request, metadata=token_metadata("secret"))
            assert raised.value.code().name == code


@pytest.mark.parametrize(
    ("sent", "stays", "message"), [(0, False, "ended"), (1500, False, "ended"), (1500, True, "in time")]
)
def test_a_peer_that_does_not_send_all(sent: int, stays: bool, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "WAIT_SECONDS", 0)
    mine, connections = empty_pool(), tcp.Connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader = connections.take(server.getsockname())
        peer, _ = server.accept()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
        peer.sendall(bytes(sent))
        if not stays:
            peer.close()
        with pytest.raises(TransferError, match=message):
            tcp.receive_blocks(reader, mine, ids(2, 5), time.monotonic() + (0.2 if stays else 60.0))
        peer.close()
        reader.close()


def test_connections_that_have_ended_are_not_used_again() -> None:
    connections = tcp.Connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        first = connections.take(address)
        peer, _ = server.accept()
        connections.give(address, first)
        assert connections.take(address) is first
        connections.give(address, first)
        peer.close()
        wait_until(lambda: has_gone(first))  # told by the kernel, perhaps a moment later
        second = connections.take(address)
        assert second is not first
        second.close()
    connections.close()


async def test_a_pull_ends_when_its_reader_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at its deadline, when the peer has stopped."""
    started = threading.Event()

    def stop(connection: socket.socket, read: block_server.BlockRead) -> None:
        started.set()
        connection.recv(1)  # until the reader goes

    monkeypatch.setattr(block_server, "_send", stop)
    async with Worker(tmp_path) as worker:
        client = host_client(GEOMETRY, empty_pool(), "secret")
        pull = asyncio.create_task(asyncio.to_thread(client.pull, worker.lease(BLOCKS), [0], ids(0), 60.0))
        assert await asyncio.to_thread(started.wait, 60.0)
        await asyncio.to_thread(client.close)
        with pytest.raises(TransferError, match="ended a read"):
            await asyncio.wait_for(pull, 50.0)
