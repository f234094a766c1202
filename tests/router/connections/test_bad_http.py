"""Invalid HTTP gets an error in OpenAI's shape, quickly, and the next request works."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from tests.harness.router import Cluster, cluster
from tests.router.raw_http import HEAD

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def raw(c: Cluster, data: bytes, end: bool = False) -> bytes:
    """Send bytes on a new connection; return what comes back until the server closes it."""
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


BAD = {
    "1 MB header": (HEAD + b"big: " + b"x" * (1 << 20) + b"\r\n\r\n", b"431"),
    "endless header": (HEAD + b"big: " + b"x" * (1 << 18), b"431"),  # and it never ends
    "10k headers": (HEAD + b"".join(b"h%d: x\r\n" % i for i in range(10_000)) + b"\r\n", b"431"),
    "both lengths": (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    "two lengths": (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}", b"400"),
    "negative": (HEAD + b"content-length: -5\r\n\r\n", b"400"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    "version": (b"GET /\xff\xfe HTTP/9.9\r\n\r\n", b"400"),
    "http/0.9": (b"GET /livez\r\n\r\n", b"505"),
    "http/2": (b"GET /livez HTTP/2.0\r\nhost: x\r\n\r\n", b"505"),
    "no host": (b"GET /livez HTTP/1.1\r\n\r\n", b"400"),
    "two hosts": (b"GET /livez HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", b"400"),
    "host with path": (b"GET /livez HTTP/1.1\r\nhost: x/livez\r\n\r\n", b"400"),
    "connect": (b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n", b"501"),
    "coded": (HEAD + b"transfer-encoding: gzip\r\n\r\n", b"501"),
    "coded and chunked": (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"501"),
    "chunked twice": (HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    "chunked in 1.0": (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    "endless trailer": (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nt: " + b"x" * (1 << 18), b"431"),
    "endless extension": (HEAD + b"transfer-encoding: chunked\r\n\r\n2;x=" + b"x" * (1 << 18), b"431"),
    "tiny chunks": (HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 70_000, b"413"),
}


@pytest.mark.parametrize(("data", "status"), BAD.values(), ids=BAD)
async def test_http(c: Cluster, data: bytes, status: bytes) -> None:
    answer = await raw(c, data)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert set(orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}
    assert (await c.complete(max_tokens=1)).status_code == 200


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
