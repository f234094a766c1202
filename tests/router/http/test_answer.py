"""Tokens are written as they arrive, or buffered for a slow client: same bytes, in order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from common.errors import EngineError
from router.api.render import ChatRenderer, RenderOptions
from router.api.text import Update
from router.http.answer import EventStream
from router.http.chunk_writer import ChunkWriter
from router.metrics import RouterMetrics
from router.request import GenerationRequest
from tests.harness.router import DRY_RUN, cluster, text_of
from tests.harness.scripted_worker import Script
from tests.router.raw_http import chat


def steady(events: list[Any]) -> list[Any]:
    """Remove the parts that differ between any two requests."""
    return [{**event, "id": "", "created": 0} if isinstance(event, dict) else event for event in events]


async def test_what_is_written_at_once_equals_what_goes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = ChunkWriter.write

    def write_and_note(writer: ChunkWriter, body: bytes) -> None:
        written.append(body)
        write(writer, body)

    monkeypatch.setattr(ChunkWriter, "write", write_and_note)
    script = Script(delay_seconds=0.001, reply=list("a chunk 😀 漢字 for each token".encode()))
    async with cluster(num_prefill=1, local_prefill_tokens=0, script=script) as c:
        quick = await c.events(max_tokens=64)
        assert len(written) > 20
        monkeypatch.setattr(ChunkWriter, "is_ready", property(lambda self: False))
        num_written = len(written)
        slow = await c.events(max_tokens=64)
        assert len(written) == num_written
        assert text_of(quick) == text_of(slow)
        assert steady(quick) == steady(slow)
        await c.until(c.is_quiet)


async def test_a_slow_reader_holds_up_nobody_and_loses_nothing() -> None:
    """Its answer is many times what the buffers between router and client hold."""
    script, num_tokens = Script(pause_seconds=0.00001), 3000
    async with cluster(script=script, info={"max_model_len": 4000}, send_buffer_bytes=4096) as c:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", c.port))
        reader, writer = await asyncio.open_connection(sock=client, limit=1024)
        writer.write(chat("abc", max_tokens=num_tokens, seed=1, stream=True))
        await reader.readuntil(b"\r\n\r\n")
        assert (await c.chat()).status_code == 200  # while nobody reads the long answer
        await c.until(lambda: c.decode[0].num_tokens >= num_tokens)  # nor until its worker has told all
        data = bytearray()
        while not data.endswith(b"0\r\n\r\n"):
            data += await reader.read(1 << 16)
        writer.close()
        await writer.wait_closed()
        pieces = [orjson.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
        assert len(pieces) < num_tokens / 2  # most came while the client did not read
        assert sum(len(piece["choices"][0]["delta"].get("content", "")) for piece in pieces) == num_tokens


class Client:
    """A transport that accepts chunks when a test says so."""

    def __init__(self) -> None:
        self.is_ready = True  # False: it is behind
        self.sent: list[bytes] = []
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()

    def write(self, body: bytes) -> None:
        assert self.is_ready
        self.sent.append(body)

    async def send(self, message: Any) -> None:
        await self._may_go_on.wait()
        self.sent.append(b"head\n" if message["type"] == "http.response.start" else message["body"])

    async def receive(self) -> Any:
        raise AssertionError("an answer reads nothing of the client")

    def stall(self) -> None:
        self.is_ready = False
        self._may_go_on.clear()

    def catch_up(self) -> None:
        """Let the client read on; as with the event loop, a task that waits in `send` continues in a later turn."""
        self.is_ready = True
        self._may_go_on.set()

    def texts(self) -> list[str]:
        lines = b"".join(self.sent).splitlines()
        events = [orjson.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        deltas = [event["choices"][0]["delta"] for event in events if "choices" in event]
        return [delta["content"] for delta in deltas if "content" in delta and "role" not in delta]


@asynccontextmanager
async def open_stream() -> AsyncIterator[tuple[EventStream, Client, asyncio.Task[None]]]:
    client = Client()
    renderer = ChatRenderer(RenderOptions("r", "m", 0), DRY_RUN)
    request = GenerationRequest("r", [], RouterMetrics("m"))
    stream = EventStream(request, renderer, {}, client)  # type: ignore[arg-type]
    stream._num_open = 1
    task = asyncio.create_task(stream.respond({"type": "http"}, client.receive, client.send))
    try:
        yield stream, client, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def update(text: str, finish_reason: str | None = None) -> Update:
    return Update(text, list(text.encode()), [], [], finish_reason)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_updates_that_come_while_the_client_is_behind_are_told_together_and_in_order() -> None:
    async with open_stream() as (stream, client, task):
        stream.on_update(0, update("a"))
        stream.on_update(0, update("b"))
        await turns()
        assert client.texts() == ["ab"]  # the headers had to go first
        stream.on_update(0, update("c"))
        assert client.texts() == ["ab", "c"]  # at once
        client.stall()
        stream.on_update(0, update("d"))
        await turns()
        client.catch_up()
        stream.on_update(0, update("e"))  # before the task that waits with "d" has its turn
        stream.on_update(0, update("f"))
        assert client.texts() == ["ab", "c"]
        await turns()
        assert client.texts() == ["ab", "c", "d", "ef"]
        stream.on_update(0, update("g"))
        stream.on_update(0, update("h", "stop"))
        await asyncio.wait_for(task, 60)
        assert client.texts() == ["ab", "c", "d", "ef", "g", "h"]
        assert client.sent[-1].endswith(b"data: [DONE]\n\n")  # in one write with the last text


async def test_an_error_comes_after_what_was_kept_or_instead_of_everything() -> None:
    async with open_stream() as (stream, client, task):
        stream.on_update(0, update("a"))
        await turns()
        client.is_ready = False
        stream.on_update(0, update("b"))
        stream.on_failure(EngineError("broken"))
        await asyncio.wait_for(task, 60)
        assert client.texts() == ["a", "b"]
        assert orjson.loads(client.sent[-1].splitlines()[0][6:])["error"]["message"] == "broken"
    async with open_stream() as (stream, client, task):
        stream.on_failure(EngineError("broken"))
        with pytest.raises(EngineError, match="broken"):
            await asyncio.wait_for(task, 60)
        assert not client.sent  # so that the answer can have a status
