"""The load for `benchmarks.router`: connections that repeat a request, and a server that only writes chunks."""

from __future__ import annotations

import asyncio
import time
from typing import cast

CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"dry-run","choices":[{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class DirectServer(asyncio.Protocol):
    """Answers every request with the same chunks, each in a separate turn of the event loop and a separate write."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._chunk = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head + self._chunk)
        self._loop.call_soon(self._write_next, self._num_tokens - 1)

    def _write_next(self, num_left: int) -> None:
        if num_left:
            self._transport.write(self._chunk)
            self._loop.call_soon(self._write_next, num_left - 1)
        else:
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def serve_direct(num_tokens: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: DirectServer(num_tokens), "127.0.0.1", 0)
    print(f"direct ready on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


class Client(asyncio.Protocol):
    """One connection that repeats a request and records when chunks arrive."""

    def __init__(self, request: bytes, deadline: float) -> None:
        self.first_chunk_seconds: list[float] = []
        self.num_chunks = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._deadline = request, deadline
        self._sent = 0.0
        self._waits_for_first = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self._waits_for_first = True
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        num_chunks = data.count(b'"content":"') - data.count(b'"content":""')
        if self._waits_for_first and num_chunks:
            self._waits_for_first = False
            self.first_chunk_seconds.append(time.perf_counter() - self._sent)
        self.num_chunks += num_chunks
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(b"0\r\n\r\n") and b"[DONE]" in self._tail:
            self._tail = b""
            if time.perf_counter() < self._deadline:
                self._send()
            else:
                self._transport.close()
                self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))
