"""Tokens that are written where they arrive: same bytes as the ordinary way, in order, at the reader's pace."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from protos import types_pb2 as pb
from router.cluster.mailbox import Mailbox
from router.http.chunk_writer import ChunkWriter
from tests.router.harness import cluster, text_of
from tests.router.scripted_worker import Script


def steady(events: list[Any]) -> list[Any]:
    """Without what differs between any two requests."""
    return [{**event, "id": "", "created": 0} if isinstance(event, dict) else event for event in events]


async def test_the_shortcut_shows_what_the_ordinary_way_shows(monkeypatch: pytest.MonkeyPatch) -> None:
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
    script = Script(pause_seconds=0.00001)
    async with cluster(script=script, info={"max_model_len": 40_000}) as c:
        body = orjson.dumps({"prompt": "abc", "max_tokens": 30_000, "seed": 1, "stream": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", c.port, limit=1024)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d"
        writer.write(head % len(body) + b"\r\n\r\n" + body)
        await reader.readuntil(b"\r\n\r\n")
        assert (await c.chat()).status_code == 200  # while nobody reads the long answer
        data = bytearray()
        while not data.endswith(b"0\r\n\r\n"):
            data += await reader.read(1 << 16)
        writer.close()
        await writer.wait_closed()
        pieces = [orjson.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
        assert sum(len(piece["choices"][0]["text"]) for piece in pieces) == 30_000


async def test_a_bug_behind_the_shortcut_ends_one_request_only() -> None:
    mailbox = Mailbox()
    taken = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)

    def broken(_: pb.TokenDelta) -> bool:
        raise ValueError

    mailbox.shortcut = broken
    mailbox.put(pb.TokenDelta(token_ids=[1]))
    with pytest.raises(Exception, match="internal error"):
        await taken
