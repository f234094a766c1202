"""The node agent: one per host. Owns the host-memory tier that the host's workers share and that outlives them.

Workers connect to a Unix socket (protocol: `kvstore/tier/protocol.py`), get the region's memory as a file descriptor,
and copy blocks themselves; the agent only tracks the slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path
from typing import Any

from common.errors import MiniInferError, TransferError
from common.logging import RateLimit
from kvstore.tier.protocol import MAX_FRAME_BYTES, TierSession, parse_hello
from kvstore.tier.regions import Regions
from kvstore.transports.sockets import UnixListener, pack, read_frame

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())
MAX_CLIENTS = 256
HELLO_SECONDS = 5.0


class TierServer:
    """The Unix socket of one agent."""

    def __init__(self, regions: Regions, socket_path: Path) -> None:
        """Raise ConfigError if the path cannot be used."""
        self._regions = regions
        self._listener = UnixListener(socket_path)
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[Any]] = set()

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve_client, sock=self._listener.sock)

    async def close(self) -> None:
        """Stop listening and end all connections; workers continue without the tier."""
        if self._server is not None:
            self._server.close()
        for task in list(self._clients):
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        self._listener.close()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            if len(self._clients) <= MAX_CLIENTS:
                await self._converse(reader, writer)
        except (EOFError, OSError):
            pass  # the worker is gone
        except MiniInferError as error:
            logger.warning("ending a worker's connection: %s", error)
            with contextlib.suppress(OSError):
                writer.write(pack(["error", str(error)]))
                await writer.drain()
        finally:
            self._clients.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await asyncio.wait_for(read_frame(reader, MAX_FRAME_BYTES), HELLO_SECONDS)
        except TimeoutError:
            raise TransferError("no hello in time") from None
        with self._regions.using(*parse_hello(hello)) as region:
            session = TierSession(region.tier)
            try:
                _send_with_fd(writer, ["ok", region.tier.num_slots], region.fd)
                while True:
                    writer.write(pack(session.handle(await read_frame(reader, MAX_FRAME_BYTES))))
                    await writer.drain()
            finally:
                session.close()


def _send_with_fd(writer: asyncio.StreamWriter, message: Any, fd: int) -> None:
    """Send the first reply and the descriptor past the stream, which cannot pass descriptors; nothing else is sent
    then."""
    own = os.dup(writer.get_extra_info("socket").fileno())
    with socket.socket(fileno=own) as sock:
        socket.send_fds(sock, [pack(message)], [fd])
