"""A client that leaves is noticed while nothing is read from it; one that half-closes still gets the answer.

On uvloop, as the router runs: another loop notices other things.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator

import orjson
import pytest
import pytest_asyncio
import uvloop

from tests.harness.router import Cluster, cluster
from tests.harness.scripted_worker import Script
from tests.router.raw_http import completion

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a reset instead of FIN


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def c() -> AsyncIterator[Cluster]:
    async with cluster(script=Script(delay_seconds=0.02)) as made:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        yield made


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("stream", "num_behind", "with_reset"),
    [(False, 0, False), (True, 1, False), (False, 1, True), (True, 0, True)],
)
async def test_a_client_that_leaves_is_noticed(
    c: Cluster, caplog: pytest.LogCaptureFixture, stream: bool, num_behind: int, with_reset: bool
) -> None:
    """Also one whose further requests wait: uvicorn does not read then, so it sees neither FIN nor reset."""
    worker = c.decode[0]
    num_before, num_cancels, num_submits = worker.num_tokens, len(worker.cancels), len(worker.submits)
    _, writer = await asyncio.open_connection("127.0.0.1", c.port)
    writer.write(completion(prompt="x", seed=1, max_tokens=500, stream=stream) * (1 + num_behind))
    await c.until(lambda: worker.num_tokens > num_before + 2)
    if with_reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()
    await c.until(lambda: len(worker.cancels) > num_cancels)
    assert worker.num_tokens < num_before + 200
    await c.until(c.is_quiet)
    assert len(worker.submits) == num_submits + 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_a_stream_that_says_nothing_is_noticed(c: Cluster) -> None:
    worker = c.decode[0]
    num_cancels = len(worker.cancels)
    reader, writer = await asyncio.open_connection("127.0.0.1", c.port)
    writer.write(completion(prompt="x", seed=1, max_tokens=500, stream=True))
    await reader.readuntil(b"data: ")
    worker.script.is_silent = True
    try:
        num_tokens = -1
        while num_tokens != worker.num_tokens:  # until all that was under way has been written
            num_tokens = worker.num_tokens
            await asyncio.sleep(0.1)
        writer.close()
        await c.until(lambda: len(worker.cancels) > num_cancels)
    finally:
        worker.speak()
    await c.until(c.is_quiet)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("version", "num_requests", "stream"), [("1.0", 1, True), ("1.1", 1, False), ("1.1", 3, False), ("1.1", 3, True)]
)
async def test_a_half_closed_client_gets_its_answers(
    c: Cluster, num_requests: int, stream: bool, version: str
) -> None:
    """As `nc -N` does it. HTTP/1.0 knows no interim answer, and has one request per connection."""
    num_cancels = len(c.decode[0].cancels)
    expected = (await c.complete("x", max_tokens=8)).json()["choices"][0]["text"]
    reader, writer = await asyncio.open_connection("127.0.0.1", c.port)
    writer.write(completion(version, prompt="x", seed=1, max_tokens=8, stream=stream) * num_requests)
    writer.write_eof()
    received = (await asyncio.wait_for(reader.read(), 60)).decode()
    writer.close()
    assert received.count("HTTP/1.1 200 OK") == num_requests
    if version == "1.0" or num_requests == 1:
        assert received.startswith("HTTP/1.1 100 Continue") == (version == "1.1")
    if stream:
        assert received.count("data: [DONE]") == num_requests
    else:
        assert received.count(orjson.dumps(expected).decode()) == num_requests
    assert len(c.decode[0].cancels) == num_cancels
