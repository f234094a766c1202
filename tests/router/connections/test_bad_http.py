"""What is wrong with HTTP itself gets an error in OpenAI's shape, quickly, and the next request works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest
import pytest_asyncio

from tests.harness.router import Cluster, cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def c() -> AsyncIterator[Cluster]:
    async with cluster() as made:
        yield made


async def raw(c: Cluster, data: bytes, end: bool = False) -> bytes:
    """Bytes on a connection of their own, and what comes back until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", c.port)
    try:
        writer.write(data)
        await writer.drain()
        if end:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"big: " + b"x" * (1 << 20) + b"\r\n\r\n", b"431"),
        (HEAD + b"big: " + b"x" * (1 << 18), b"431"),  # and it never ends
        (HEAD + b"".join(b"h%d: x\r\n" % i for i in range(10_000)) + b"\r\n", b"431"),
        (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}", b"400"),
        (HEAD + b"content-length: -5\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"GET /\xff\xfe HTTP/9.9\r\n\r\n", b"400"),
        (b"GET /livez\r\n\r\n", b"505"),
        (b"GET /livez HTTP/2.0\r\nhost: x\r\n\r\n", b"505"),
        (b"GET /livez HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nhost: x/livez\r\n\r\n", b"400"),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n", b"501"),
        (HEAD + b"transfer-encoding: gzip\r\n\r\n", b"501"),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"501"),
        (HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nt: " + b"x" * (1 << 18), b"431"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2;x=" + b"x" * (1 << 18), b"431"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 70_000, b"413"),
    ],
    ids=[
        "1 MB header",
        "endless header",
        "10k headers",
        "both lengths",
        "two lengths",
        "negative",
        "tls",
        "version",
        "http/0.9",
        "http/2",
        "no host",
        "two hosts",
        "host with path",
        "connect",
        "coded",
        "coded and chunked",
        "chunked twice",
        "chunked in 1.0",
        "endless trailer",
        "endless extension",
        "tiny chunks",
    ],
)
async def test_http(c: Cluster, data: bytes, status: bytes) -> None:
    answer = await raw(c, data)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert set(orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}
    assert (await c.complete(max_tokens=1)).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_a_half_closed_and_an_abandoned_body_leave_nothing_open(c: Cluster) -> None:
    await raw(c, HEAD + b'content-length: 50\r\n\r\n{"prompt"', end=True)
    assert (await c.complete(max_tokens=1)).status_code == 200
    await c.until(c.is_quiet)


async def test_a_slow_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.body.BODY_TIMEOUT_SECONDS", 0.1)
    async with cluster() as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.port)
        writer.write(HEAD + b'content-length: 50\r\n\r\n{"prompt"')
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_slow_headers_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.connections.protocol.HEADER_TIMEOUT_SECONDS", 0.1)
    async with cluster() as c:
        assert (await raw(c, HEAD)).startswith(b"HTTP/1.1 408")
