"""Handing out descriptors: to readers, to clients that send nonsense, and after a crash."""

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from common.errors import ConfigError, TransferError, UnavailableError
from kvstore.transports.descriptor_server import DescriptorServer, fetch_pool
from kvstore.transports.shared_memory import map_fd, reopen_read_only
from kvstore.transports.sockets import UnixListener, send_frame
from tests.harness.waiting import wait_until
from tests.kvstore.helpers import GEOMETRY, Owner, num_descriptors_of


def test_a_client_gets_the_description_and_a_read_only_descriptor(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    try:
        info, fd = fetch_pool(str(owner.socket), 60.0)
        assert info == owner.info
        mapping = map_fd(fd, GEOMETRY.pool_bytes, False)
        assert mapping[:100] == owner.blocks[0, :100].tobytes()
        with pytest.raises((PermissionError, ConfigError)):
            map_fd(fd, GEOMETRY.pool_bytes, True)
        os.close(fd)
        assert owner.socket.stat().st_mode & 0o777 == 0o600
    finally:
        owner.close()
    assert not owner.socket.exists()
    with pytest.raises(UnavailableError):
        fetch_pool(str(owner.socket), 60.0)


def test_clients_that_misbehave_do_not_disturb_others(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    silent = []
    try:
        for _ in range(40):
            client = socket.socket(socket.AF_UNIX)
            client.connect(str(owner.socket))
            silent.append(client)
            with contextlib.suppress(BrokenPipeError):  # it has been served already
                client.send(os.urandom(100))
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(120):
            _, fd = fetch_pool(str(owner.socket), 60.0)
            os.close(fd)
        # One that stayed open for each would be 120 more; the 40 silent ones may have been accepted since.
        assert len(os.listdir("/proc/self/fd")) < descriptors + 100
    finally:
        for client in silent:
            client.close()
        owner.close()


@pytest.mark.parametrize("answer", [{"pool": b"\xff"}, {"pool": 1}, [1], {"pool": ["w", 1, []]}])
def test_something_else_on_the_socket_is_an_error(tmp_path: Path, answer: object) -> None:
    listener = UnixListener(tmp_path / "x.sock")

    def reply() -> None:
        peer, _ = listener.sock.accept()
        with peer:
            send_frame(peer, answer)

    thread = threading.Thread(target=reply)
    thread.start()
    with pytest.raises(TransferError):
        fetch_pool(str(listener.path), 60.0)
    thread.join()
    listener.close()


def test_a_taken_path_is_refused_and_costs_no_descriptor(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    before = num_descriptors_of(owner.fd)
    with pytest.raises(ConfigError, match="another process"):
        DescriptorServer(owner.socket, owner.info, reopen_read_only(owner.fd))
    wait_until(lambda: num_descriptors_of(owner.fd) == before)  # the probing connection is being served
    owner.close()
    owner.server.close()  # twice is fine
