"""memfds: sealed, nameless, and only writable for whom they should be."""

import fcntl
import mmap
import os
import tempfile
from pathlib import Path

import pytest

from common.errors import ConfigError, TransferError
from kvstore.transports.shared_memory import blocks_over, create_memfd, map_fd, reopen_read_only
from tests.harness.waiting import wait_until
from tests.kvstore.helpers import shm_names


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
