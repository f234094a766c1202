"""Sockets of the KV store: private Unix listeners, and msgpack frames that may carry descriptors.

A frame is a little-endian uint32 length and as many bytes of msgpack. Whatever a peer sends, reading yields a message
or raises TransferError, and allocates no more than the reader's bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from common.errors import ConfigError, TransferError, UnavailableError
from common.logging import RateLimit

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

HEADER = struct.Struct("<I")
ANYTHING = msgspec.msgpack.Decoder()
RETRY_SECONDS = 0.1
MAX_PATH_BYTES = 107  # limit of sockaddr_un on Linux


class UnixListener:
    """Listens on a socket that only this user can open (0600, in a directory made 0700)."""

    def __init__(self, path: Path) -> None:
        """Replace the socket of a dead process, if there is one.

        Raises ConfigError if a live process listens there, or if the path cannot be used.
        """
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ConfigError(f"socket path longer than {MAX_PATH_BYTES} bytes: choose a shorter --run-dir")
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            _make_private(path.parent)
            _remove_stale(path)
            self.sock.bind(str(path))
            path.chmod(0o600)  # before listen(), until which nobody can connect
            self.sock.listen(64)
            self._identity = _identity(path)
        except OSError as error:
            self.sock.close()
            raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
        except ConfigError:
            self.sock.close()
            raise

    def close(self) -> None:
        """Stop listening and remove the file, unless a successor has replaced it."""
        self.sock.close()
        with contextlib.suppress(FileNotFoundError):
            if _identity(self.path) == self._identity:
                self.path.unlink()


def accepted(listener: socket.socket, is_closing: Callable[[], bool], purpose: str) -> Iterator[socket.socket]:
    """Yield connections as they come, until `listener` fails because it is being closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if is_closing():
                return
            # Most likely the process is out of descriptors, and some are free again a moment later.
            logger.warning("cannot accept a connection for %s: %s", purpose, error.strerror)
            time.sleep(RETRY_SECONDS)
            continue
        yield connection


def connect_unix(path: str, timeout_seconds: float) -> socket.socket:
    """Connect to a listener. Raises UnavailableError if there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(timeout_seconds)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise UnavailableError(f"no server on the Unix socket: {error.strerror or error}") from error
    return sock


def send_frame(sock: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send one frame, with descriptors attached to its first byte. Raises OSError."""
    data = pack(message)
    sent = socket.send_fds(sock, [data], list(fds)) if fds else sock.send(data)
    if sent < len(data):
        sock.sendall(data[sent:])


def recv_frame(sock: socket.socket, max_bytes: int, max_fds: int = 0) -> tuple[Any, list[int]]:
    """Receive one frame and its descriptors, which the caller closes. Raises TransferError."""
    fds: list[int] = []
    ancillary_bytes = socket.CMSG_LEN(4 * max_fds) if max_fds else 0
    try:
        header = b""
        while len(header) < HEADER.size:
            wanted = HEADER.size - len(header)
            data, ancillary, flags, _ = sock.recvmsg(wanted, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds += array("i", content[: len(content) - len(content) % 4])
            if not data or flags & socket.MSG_CTRUNC:
                raise TransferError("the peer closed the connection" if not data else "too many descriptors")
            header += data
        size = body_size(header, max_bytes)
        body = bytearray()
        while len(body) < size:
            data = sock.recv(min(size - len(body), 1 << 20))
            if not data:
                raise TransferError("the peer closed the connection inside a frame")
            body += data
        return unpack(bytes(body)), fds
    except BaseException as error:  # Ctrl-C and cancelled tasks, too: do not leak descriptors
        for fd in fds:
            os.close(fd)
        if isinstance(error, OSError):
            raise TransferError(f"the connection failed: {error.strerror or error}") from error
        raise


async def read_frame(
    reader: asyncio.StreamReader, max_bytes: int, decoder: msgspec.msgpack.Decoder[Any] = ANYTHING
) -> Any:
    """Read one frame without descriptors. Raises TransferError; EOFError if the stream ends between frames."""
    try:
        size = body_size(await reader.readexactly(HEADER.size), max_bytes)
        return unpack(await reader.readexactly(size), decoder)
    except asyncio.IncompleteReadError as error:
        if not error.partial and error.expected == HEADER.size:
            raise EOFError from None
        raise TransferError("the peer closed the connection inside a frame") from error
    except OSError as error:
        raise TransferError(f"the connection failed: {error.strerror or error}") from error


def pack(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


def unpack(body: bytes | bytearray, decoder: msgspec.msgpack.Decoder[Any] = ANYTHING) -> Any:
    """Decode one msgpack value of the decoder's type. Raises TransferError for malformed bytes."""
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
        raise TransferError("malformed frame") from error


def body_size(header: bytes | bytearray, max_bytes: int) -> int:
    """Decode a frame's length. Raises TransferError if it exceeds `max_bytes`."""
    (size,) = HEADER.unpack(header)
    if size > max_bytes:
        raise TransferError(f"a frame of {size} bytes where at most {max_bytes} are allowed")
    return int(size)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()):
        raise ConfigError(f"{folder} belongs to another user: choose another --run-dir")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        raise ConfigError(f"{folder} can be written by others: chmod 700 it or choose another --run-dir")


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_ctime_ns  # an inode number alone may be reused at once


def _remove_stale(path: Path) -> None:
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{path} exists and is not a socket: remove it or choose another --run-dir")
    try:
        connect_unix(str(path), 1.0).close()
    except UnavailableError:
        path.unlink(missing_ok=True)
        return
    raise ConfigError(f"another process listens on {path}: stop it or choose another --run-dir")


def has_gone(peer: socket.socket) -> bool:
    """Whether an idle connection, on which no bytes are expected, has ended or received bytes."""
    try:
        peer.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
