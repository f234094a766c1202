"""Unauthorized calls to an internal gRPC port are refused before they are received; little of them is buffered."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.net.rpc import MAX_REQUEST_BYTES, MAX_WATCHERS, RpcServer, open_channel, token_metadata
from protos import kvstore_pb2, kvstore_pb2_grpc
from worker.service import STOP_SECONDS

NUM_CALLS = 8
LITTLE = 2  # messages: of a call that is not read yet, gRPC buffers one window, which is much less
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


class Echo(kvstore_pb2_grpc.KvTransferServicer):  # type: ignore[misc]
    async def Renew(self, request: kvstore_pb2.LeaseRequest, context: object) -> kvstore_pb2.LeaseReply:
        return kvstore_pb2.LeaseReply(held=len(request.lease_id) > 0)


def serve(pipe: Connection) -> None:
    """Run one server in a process, whose memory can be measured."""

    async def run() -> None:
        server = RpcServer("127.0.0.1", 0, "secret")
        server.add(kvstore_pb2_grpc.add_KvTransferServicer_to_server, Echo(), "mini_infer.v1.KvTransfer")
        await server.start()
        await server.health.set_serving(True)
        pipe.send(server.port)
        await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


@asynccontextmanager
async def server_process() -> AsyncIterator[tuple[str, int]]:
    """Start the server; return its address and process id."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    try:
        assert await asyncio.to_thread(ours.poll, 200)
        yield f"127.0.0.1:{ours.recv()}", process.pid or 0
    finally:
        ours.send(None)
        await asyncio.to_thread(process.join, 60)
        process.kill()


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


async def codes_of(address: str, method: str, message: bytes) -> list[str]:
    """Return the status names of `NUM_CALLS` calls at once, each on a connection of its own, without a token."""

    async def call() -> str:
        async with grpc.aio.insecure_channel(address, options=UNLIMITED) as channel:
            name: str = (await channel.unary_unary(method, None, None)(message, timeout=60).code()).name
            return name

    return await asyncio.gather(*(call() for _ in range(NUM_CALLS)))


async def test_messages_without_a_token_are_not_received() -> None:
    async with server_process() as (address, pid):
        before = peak_mb(pid)
        renew = "/mini_infer.v1.KvTransfer/Renew"
        size = MAX_REQUEST_BYTES - 100  # larger ones are refused by their length
        message = kvstore_pb2.LeaseRequest(lease_id="x" * size).SerializeToString()
        assert await codes_of(address, renew, message) == ["UNAUTHENTICATED"] * NUM_CALLS
        too_large = await codes_of(address, renew, b"\0" * (60 << 20))
        assert set(too_large) <= {"UNAUTHENTICATED", "RESOURCE_EXHAUSTED"}
        assert peak_mb(pid) - before < LITTLE * size / 2**20
        async with grpc.aio.insecure_channel(
            address, options=UNLIMITED
        ) as channel:  # the control: it can be received
            stub = kvstore_pb2_grpc.KvTransferStub(channel)
            request = kvstore_pb2.LeaseRequest.FromString(message)
            assert (await stub.Renew(request, timeout=60, metadata=token_metadata("secret"))).held
        assert peak_mb(pid) - before > size / 2**20


async def test_health_checks_hold_little_and_end() -> None:
    async with server_process() as (address, pid):
        before = peak_mb(pid)
        name = health_pb2.HealthCheckRequest(service="x" * (MAX_REQUEST_BYTES - 100)).SerializeToString()
        codes = await codes_of(address, "/grpc.health.v1.Health/Check", name)
        assert codes == ["OK"] * NUM_CALLS
        assert peak_mb(pid) - before < LITTLE * MAX_REQUEST_BYTES / 2**20
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_watchers_are_few_and_hear_of_changes() -> None:
    server = RpcServer("127.0.0.1", 0, "secret")
    await server.start()
    await server.health.set_serving(True)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watchers = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(MAX_WATCHERS)]
        for watcher in watchers:
            assert (await watcher.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await stub.Watch(health_pb2.HealthCheckRequest(), timeout=30).code() is (
            grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        await server.health.set_serving(False)
        assert (await watchers[-1].read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for watcher in watchers:
            watcher.cancel()
    await server.stop(0)


@pytest.mark.parametrize("method", ["Renew", "Read", "Nothing"])
async def test_every_kind_of_method_is_refused(method: str) -> None:
    server = RpcServer("127.0.0.1", 0, "secret")
    server.add(kvstore_pb2_grpc.add_KvTransferServicer_to_server, Echo(), "mini_infer.v1.KvTransfer")
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_stream(f"/mini_infer.v1.KvTransfer/{method}", None, None)(b"", timeout=30)
        expected = grpc.StatusCode.UNIMPLEMENTED if method == "Nothing" else grpc.StatusCode.UNAUTHENTICATED
        assert await call.code() is expected
    await server.stop(0)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_hosts_of_ipv6_are_listened_on(host: str) -> None:
    server = RpcServer(host, 0)
    await server.start()
    try:
        assert server.address == f"[::1]:{server.port}"
        async with open_channel(server.address) as channel:
            await asyncio.wait_for(channel.channel_ready(), 60)
    finally:
        await server.stop(STOP_SECONDS)


async def test_a_stop_does_not_wait_for_peers_that_have_no_call_open() -> None:
    """A blocking channel without an open call reads nothing, not even the end of the connection."""
    server = RpcServer("127.0.0.1", 0)
    server.add(kvstore_pb2_grpc.add_KvTransferServicer_to_server, Echo(), "mini_infer.v1.KvTransfer")
    await server.start()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    peer = context.Process(target=call_once, args=(server.address, theirs))
    peer.start()
    try:
        assert await asyncio.to_thread(ours.poll, 200)
        began = time.monotonic()
        await server.stop(STOP_SECONDS)
        assert time.monotonic() - began < 30.0  # the peer stays until it is told to go
    finally:
        ours.send(None)
        await asyncio.to_thread(peer.join, 60)
        peer.kill()


def call_once(address: str, pipe: Connection) -> None:
    with grpc.insecure_channel(address) as channel:
        kvstore_pb2_grpc.KvTransferStub(channel).Renew(kvstore_pb2.LeaseRequest(lease_id="1"), timeout=60)
        pipe.send(None)
        pipe.recv()
