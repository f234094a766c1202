"""Connections of a pool's readers, which end with its owner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.transports.cuda_ipc.held_server import HeldServer, fetch_held
from kvstore.transports.shared_memory import SEND_TIMEOUT_SECONDS, reopen_read_only
from tests.kvstore.helpers import Owner


def test_a_held_connection_outlives_other_clients(tmp_path: Path) -> None:
    """Its end would mean that the owner is gone, and the reader would unmap its memory."""
    owner = Owner(tmp_path)
    path = tmp_path / "held.sock"
    server = HeldServer(path, owner.info, reopen_read_only(owner.fd))
    held = []
    try:
        for _ in range(3):
            _, fd, connection = fetch_held(str(path), 60.0)
            os.close(fd)
            held.append(connection)
        held[0].settimeout(SEND_TIMEOUT_SECONDS + 1.0)
        with pytest.raises(TimeoutError):
            held[0].recv(1)
        server.close()
        assert [connection.recv(1) for connection in held] == [b"", b"", b""]
    finally:
        for connection in held:
            connection.close()
        server.close()
        owner.close()
