"""An OpenAI-compatible server with scripted replies: bytes, one script entry per request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

Reply = list[bytes]  # written one after the other
SILENCE = b""  # as the last entry of a reply: nothing more comes, and the connection stays open
Script = Callable[[dict], Reply]


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_chunks(count: int, prompt_tokens: int = 7, cached: int = 0) -> Reply:
    """Make a whole answer of `count` chunks with usage and [DONE]."""
    usage = {
        "prompt_tokens": prompt_tokens, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": cached}
    }  # fmt: skip
    chunks = [event(choices=[{"index": 0, "text": " word", "finish_reason": None}]) for _ in range(count)]
    return [*chunks, event(choices=[], usage=usage), b"data: [DONE]\n\n"]


def chunked(parts: Reply, status: str = "200 OK", end: bool = True) -> Reply:
    """Encode `parts` by HTTP/1.1 chunked transfer encoding."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    body = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    return [head, *body, *([b"0\r\n\r\n"] if end else [])]


class Server:
    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[dict] = []
        self.num_connections = 0
        self.handlers: set[asyncio.Task] = set()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        handler = asyncio.current_task()
        assert handler is not None
        self.handlers.add(handler)
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.split(b"\r\n")
                lengths = [int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length")]
                body = json.loads(await reader.readexactly(sum(lengths)) or b"{}")
                self.requests.append({"head": head.decode(), **body})
                reply = self._script(body)
                for part in reply:
                    writer.write(part)
                    await writer.drain()
                if SILENCE in reply:
                    await asyncio.sleep(60)
                if not reply or not reply[-1].endswith(b"0\r\n\r\n"):
                    break


@contextlib.asynccontextmanager
async def running(script: Script) -> AsyncIterator[Server]:
    server = Server(script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=1 << 20)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await asyncio.sleep(0.01)  # a connection that was accepted just now has its handler then
        for handler in server.handlers:
            handler.cancel()
        await asyncio.gather(*server.handlers, return_exceptions=True)
