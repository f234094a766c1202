"""Fast path of a chunk to its client that bypasses ASGI. Knows uvicorn's protocol, but not the chunk's content."""

from __future__ import annotations

import asyncio
import weakref

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

CHUNK_WRITER = "router.http.chunk_writer"  # key in the scope of a request


class ChunkWriter:
    """Writes chunks of an answer that has begun, in chunked encoding, without the layers of ASGI or waiting."""

    __slots__ = ("_cycle", "_write")

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
        self._cycle = weakref.ref(cycle)  # whose scope holds this: a strong one needs the garbage collector
        self._write = transport.write

    @property
    def is_ready(self) -> bool:
        """Whether a chunk can be written now: headers are sent, the client is connected, its buffer is not full."""
        cycle = self._cycle()
        return bool(
            cycle is not None and cycle.chunked_encoding and not (cycle.flow.write_paused or cycle.disconnected)
        )

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection stays open after this answer; a server that shuts down clears it."""
        cycle = self._cycle()
        return cycle is not None and cycle.keep_alive

    def write(self, body: bytes) -> None:
        """Write one non-empty chunk. Call it only while `is_ready`."""
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


class ChunkProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a ChunkWriter in the scope of each request. `router/connections` adds bounds."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.scope[CHUNK_WRITER] = ChunkWriter(self.cycle, self.transport)  # type: ignore[literal-required]
