"""Bounds on HTTP connections: their number, time without a request, time without being read."""

from __future__ import annotations

import asyncio
import gc
import resource
from contextlib import AsyncExitStack, suppress
from typing import Any

import orjson
import pytest

from common.errors import ConfigError
from router.config import HttpConfig
from router.connections.http_settings import ConnectionSettings
from router.connections.protocol import MAX_PIPELINED, allow_descriptors
from router.server import parse_settings
from tests.harness.router import Cluster, cluster
from tests.harness.scripted_worker import Script
from tests.router.raw_http import HEAD, completion

COMPLETION = completion(prompt="x", max_tokens=1)
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def http_config(**settings: Any) -> HttpConfig:
    """Settings of the core and of the wing, which type checkers do not know."""
    return HttpConfig(**settings)


async def connect(c: Cluster, stack: AsyncExitStack) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", c.port)
    stack.callback(writer.close)
    return reader, writer


async def ask(connection: Connection, data: bytes) -> bytes:
    """Send a request; return everything that comes until the router closes the connection."""
    reader, writer = connection
    writer.write(data)
    return await asyncio.wait_for(reader.read(), 60)


async def test_requests_beyond_the_limit_get_503_and_health_checks_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.connections.protocol.SPARE_SECONDS", 60.0)
    limits = http_config(max_connections=2, reserved_per_address=0)
    async with cluster(http=limits) as c, AsyncExitStack() as stack:
        held = [await connect(c, stack) for _ in range(2)]
        answer = await ask(await connect(c, stack), COMPLETION)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert orjson.loads(body)["error"]["type"] == "service_unavailable_error"
        assert not c.decode[0].submits
        assert (await ask(await connect(c, stack), b"GET /livez?x HTTP/1.1\r\nhost: x\r\n\r\n")).startswith(
            b"HTTP/1.1 200 "
        )
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(60):
            while (await c.complete(max_tokens=1)).status_code != 200:
                await asyncio.sleep(0.02)


async def test_health_checks_are_answered_however_many_connections_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer takes the spare place of the oldest: silent connections cannot hold them all."""
    monkeypatch.setattr("router.connections.connection_slots.NUM_SPARE_CONNECTIONS", 2)
    monkeypatch.setattr("router.connections.protocol.SPARE_SECONDS", 60.0)
    async with cluster(http=http_config(max_connections=1)) as c, AsyncExitStack() as stack:
        silent = [await connect(c, stack) for _ in range(6)]
        answer = await ask(await connect(c, stack), b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(silent[1][0].read(), 60) == b""
        assert (await ask(silent[-1], COMPLETION)).startswith(b"HTTP/1.1 503 ")


async def test_a_connection_that_asks_for_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.connections.protocol.HEADER_TIMEOUT_SECONDS", 0.1)
    async with cluster() as c, AsyncExitStack() as stack:
        silent, line_ends = await connect(c, stack), await connect(c, stack)
        assert await ask(silent, b"") == b""
        assert b"200 OK" not in await ask(line_ends, b"\r\n")


async def test_what_follows_an_early_answer_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as c, AsyncExitStack() as stack:
        reader, writer = await connect(c, stack)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        assert b" 415 " in await asyncio.wait_for(reader.readline(), 60)
        monkeypatch.setattr("router.connections.protocol.HEADER_TIMEOUT_SECONDS", 0.3)
        async with asyncio.timeout(60):
            with suppress(ConnectionError):
                while True:
                    writer.write(b"x" * 50_000)
                    await writer.drain()
                    await asyncio.sleep(0.01)


async def test_an_answer_before_the_end_of_the_body_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after it must not be taken for the next request."""
    monkeypatch.setattr("router.connections.connection.LINGER_SECONDS", 0.2)
    async with cluster() as c, AsyncExitStack() as stack:
        connection = await connect(c, stack)
        connection[1].write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 40\r\n\r\n")
        assert b" 404 " in await asyncio.wait_for(connection[0].readline(), 60)
        answer = await ask(connection, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        assert b"connection: close" in answer.partition(b"\r\n\r\n")[0]
        assert b"200 OK" not in answer


async def test_who_goes_on_sending_after_an_answer_is_cut_off() -> None:
    async with cluster() as c, AsyncExitStack() as stack:
        _, writer = await connect(c, stack)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nname: ")
        num_sent = 0
        with suppress(ConnectionError):
            while num_sent < 60 << 20:
                writer.write(b"x" * 65536)
                num_sent += 65536
                await asyncio.wait_for(writer.drain(), 60)
        assert num_sent < 60 << 20


async def test_few_requests_may_wait_behind_one() -> None:
    async with cluster() as c, AsyncExitStack() as stack:
        answers = await ask(await connect(c, stack), b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 5000)
        assert answers.count(b"200 OK") == 1 + MAX_PIPELINED


async def test_an_offer_of_another_protocol_changes_nothing() -> None:
    """Java's client makes such an offer with every request."""
    offer = (
        b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\ncontent-length"
    )
    async with cluster() as c, AsyncExitStack() as stack:
        for request in (COMPLETION, b"GET /livez HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"):
            connection = await connect(c, stack)
            offered = request.replace(b"content-length", offer)
            answer = await ask(connection, offered + b"GET /livez HTTP/1.0\r\n\r\n")
            assert answer.count(b"HTTP/1.1 200 ") == 2
        assert len(c.decode[0].submits) == 1


async def test_a_bad_chunk_after_the_headers_has_one_answer() -> None:
    async with cluster() as c, AsyncExitStack() as stack:
        connection = await connect(c, stack)
        connection[1].write(HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await asyncio.sleep(0.05)  # the application waits for the body by now
        answer = await ask(connection, b"not a size\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1
        assert (await c.complete(max_tokens=1)).status_code == 200


async def test_nonsense_in_the_middle_of_a_stream_does_not_land_in_it() -> None:
    async with cluster(script=Script(delay_seconds=0.01)) as c, AsyncExitStack() as stack:
        reader, writer = connection = await connect(c, stack)
        body = orjson.dumps({"prompt": "x", "max_tokens": 400, "stream": True})
        writer.write(COMPLETION.partition(b"content-length")[0] + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert b" 200 " in await reader.readline()
        with suppress(ConnectionResetError):
            assert b"error" not in await ask(connection, b"\0\0\0\0\r\n\r\n")
        await c.until(lambda: bool(c.decode[0].cancels))
        await c.until(c.is_quiet)


async def test_a_client_that_never_reads_is_cut_off_and_its_request_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = http_config(stalled_client_seconds=1.0)
    script = Script(tokens_per_step=50, pause_seconds=0.0001)
    async with cluster(script=script, info={"max_model_len": 1 << 20}, http=limits) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.port, limit=1024)
        try:
            writer.write(completion(prompt="x", max_tokens=1_000_000, stream=True, logprobs=5))
            await reader.readuntil(b"\r\n\r\n")
            await c.until(lambda: bool(c.decode[0].cancels), 60)
            await c.until(c.is_quiet)
            assert c.decode[0].num_tokens < 1_000_000
        finally:
            writer.transport.abort()


def test_settings() -> None:
    for field in ("max_connections", "idle_connection_seconds", "stalled_client_seconds"):
        with pytest.raises(ConfigError):
            http_config(**{field: 0})
    config, http = parse_settings(["--decode=a:1", "--max-connections=5"])
    assert (config.decode, http.of(ConnectionSettings).max_connections) == ("a:1", 5)


def test_the_descriptor_limit_is_raised_or_named() -> None:
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        allow_descriptors(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        with pytest.raises(ConfigError, match="--max-connections"):
            allow_descriptors(hard + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_request_leaves_nothing_to_the_collector() -> None:
    """It runs every few thousand requests: garbage would be megabytes, scattered over the heap."""
    streamed = completion(prompt="x", max_tokens=4, stream=True)
    async with cluster() as c, AsyncExitStack() as stack:
        reader, writer = await connect(c, stack)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(5):
                writer.write(streamed)
                await asyncio.wait_for(reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n"), 60)
            await c.until(c.is_quiet)
            gc.collect()
            kinds = {type(item) for item in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not {kind for kind in kinds if kind.__module__.startswith(("router.", "uvicorn."))}
