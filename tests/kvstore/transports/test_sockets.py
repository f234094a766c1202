"""Frames and listeners: malformed frames, stale and taken sockets."""

import asyncio
import os
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, TransferError, UnavailableError
from kvstore.transports.sockets import (
    HEADER,
    UnixListener,
    connect_unix,
    read_frame,
    recv_frame,
    send_frame,
    unpack,
)
from tests.kvstore.helpers import num_descriptors_of


def test_frames_carry_values_and_descriptors() -> None:
    a, b = socket.socketpair()
    with a, b:
        read_end, write_end = os.pipe()
        send_frame(a, ["hello", 1, b"x", None], [write_end])
        os.close(write_end)
        message, fds = recv_frame(b, 1000, max_fds=1)
        assert message == ["hello", 1, b"x", None]
        [received] = fds
        assert not os.get_inheritable(received)
        os.write(received, b"!")
        assert os.read(read_end, 1) == b"!"
        os.close(received)
        os.close(read_end)


def test_large_frames_arrive_whole() -> None:
    a, b = socket.socketpair()
    with a, b:
        data = os.urandom(150_000)
        send_frame(a, data)
        assert recv_frame(b, 1 << 20) == (data, [])


def test_a_frame_above_the_bound_is_refused_before_it_is_read() -> None:
    a, b = socket.socketpair()
    with a, b:
        a.sendall(HEADER.pack(2**32 - 1))
        with pytest.raises(TransferError, match="at most"):
            recv_frame(b, 1000)


def test_descriptors_of_a_refused_frame_are_closed() -> None:
    a, b = socket.socketpair()
    with a, b:
        socket.send_fds(a, [HEADER.pack(3) + b"\xc1\xc1\xc1"], [a.fileno()])
        with pytest.raises(TransferError, match="malformed"):
            recv_frame(b, 1000, max_fds=1)
        assert num_descriptors_of(a.fileno()) == 1


NESTED = b"\x91" * 100_000
HUGE_LIST, HUGE_MAP, HUGE_BYTES = b"\xdd" + b"\xff" * 4, b"\xdf" + b"\xff" * 4, b"\xc6" + b"\xff" * 4
NO_TEXT, NO_KEY, TWO_VALUES, NOTHING = b"\xa1\xff", b"\x81\x80\x01", b"\x01\x01", b""


@pytest.mark.parametrize("body", [NESTED, HUGE_LIST, HUGE_MAP, HUGE_BYTES, NO_TEXT, NO_KEY, TWO_VALUES, NOTHING])
def test_bytes_that_are_not_one_value_are_the_peers_error(body: bytes) -> None:
    with pytest.raises(TransferError, match="malformed"):
        unpack(body)


@given(st.binary(max_size=64))
def test_random_bytes_end_in_a_value_or_a_transfer_error(data: bytes) -> None:
    a, b = socket.socketpair()
    with b:
        with a:
            a.sendall(data)
        try:
            recv_frame(b, 1 << 16)
        except TransferError:
            return
        assert len(data) > HEADER.size


@given(st.binary(max_size=64))
async def test_the_asynchronous_reader_agrees(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    try:
        value = await read_frame(reader, 1 << 16)
    except EOFError:
        assert data == b""
    except TransferError:
        assert data
    else:
        (size,) = HEADER.unpack(data[: HEADER.size])
        assert value == msgspec.msgpack.decode(data[HEADER.size : HEADER.size + size])


def test_a_listener_is_private_and_removes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.sock"
    listener = UnixListener(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="another process"):
        UnixListener(path)
    listener.close()
    assert not path.exists()
    with pytest.raises(UnavailableError):
        connect_unix(str(path), 1.0)


def test_a_dead_process_file_is_replaced_and_a_successor_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    first = UnixListener(path)
    first.sock.close()  # as SIGKILL would: the file stays
    second = UnixListener(path)
    first.close()
    connect_unix(str(path), 1.0).close()
    second.close()
    assert not path.exists()


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shorter"):
        UnixListener(tmp_path / ("x" * 200))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a socket"):
        UnixListener(tmp_path / "file")
    with pytest.raises(ConfigError):
        UnixListener(tmp_path / "file" / "a.sock")
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        UnixListener(public / "a.sock")
