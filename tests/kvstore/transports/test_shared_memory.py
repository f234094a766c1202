"""memfds: sealed, nameless, writable only for the right processes, handed out to readers, also after a crash."""

import contextlib
import fcntl
import mmap
import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from common.errors import ConfigError, TransferError, UnavailableError
from kvstore.transports.shared_memory import (
    DescriptorServer,
    blocks_over,
    create_memfd,
    fetch_pool,
    map_fd,
    reopen_read_only,
)
from kvstore.transports.sockets import UnixListener, send_frame
from tests.harness.waiting import wait_until
from tests.kvstore.helpers import GEOMETRY, Owner, num_descriptors_of, shm_names


def test_readers_see_what_the_owner_writes_and_cannot_write() -> None:
    before = shm_names()
    fd = create_memfd("test", 8192)
    reader_fd = reopen_read_only(fd)
    try:
        owner, reader = map_fd(fd, 8192, True), map_fd(reader_fd, 8192, False)
        owner[5000:5003] = b"abc"
        assert reader[5000:5003] == b"abc"
        with pytest.raises(TypeError):
            reader[0:1] = b"x"
        with pytest.raises((PermissionError, ConfigError)):
            map_fd(reader_fd, 8192, True)
        view = blocks_over(reader, 2, 4096)
        assert view[1, 904] == ord("a")
        assert not view.flags.writeable
        wait_until(lambda: shm_names() <= before)
        assert os.fstat(fd).st_mode & 0o777 == 0o400
    finally:
        os.close(reader_fd)
        os.close(fd)


def test_the_size_is_sealed() -> None:
    fd = create_memfd("test", 8192)
    try:
        for size in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(fd)


def test_a_descriptor_that_could_shrink_or_is_too_short_is_refused(tmp_path: Path) -> None:
    unsealed = os.memfd_create("test")
    os.ftruncate(unsealed, 8192)
    short = create_memfd("test", 4096)
    try:
        with pytest.raises(TransferError, match="sealed"):
            map_fd(unsealed, 8192, False)
        with pytest.raises(TransferError, match="shorter"):
            map_fd(short, 4097, False)
        with pytest.raises(TransferError):
            map_fd(short, 0, False)
        with tempfile.TemporaryFile() as file, pytest.raises(TransferError):
            map_fd(file.fileno(), mmap.PAGESIZE, False)
    finally:
        os.close(unsealed)
        os.close(short)


def test_too_much_memory_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="kv-cache-gb"):
        create_memfd("the test", 1 << 50)


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
