"""Reads what services say they are doing, sent by `worker/start_progress`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

MAX_STATUS_LEN = 200


async def read_statuses(path: str, on_status: Callable[[str], None]) -> asyncio.DatagramTransport:
    """Call `on_status` with each line that arrives at a Unix socket at `path`, until the transport is closed."""
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _StatusReader(on_status), local_addr=path, family=socket.AF_UNIX
    )
    return transport


class _StatusReader(asyncio.DatagramProtocol):
    """Reads the status lines of systemd's notification protocol."""

    def __init__(self, on_status: Callable[[str], None]) -> None:
        self._on_status = on_status

    def datagram_received(self, data: bytes, addr: object) -> None:
        for line in data.decode(errors="replace").splitlines():
            if line.startswith("STATUS="):
                text = line.removeprefix("STATUS=")[:MAX_STATUS_LEN]
                self._on_status("".join(character for character in text if character.isprintable()))
