"""Messages between a worker's front and its engine: a 4-byte length and msgpack, over a Unix socket pair.

A message is a list whose first entry names it; `Op` and `Event` list the names. Both ends are processes of one
worker, so a malformed frame is a bug and ends the connection.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from typing import Any

import msgpack

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
SOCKET_BUFFER_BYTES = 4 << 20  # a step's frame fits, so that the engine need not wait for the front


class Op:
    """Front -> engine process."""

    START = "start"  # settings of the engine
    SUBMIT = "submit"  # id, fields of a request
    CANCEL = "cancel"  # id
    RENEW = "renew"  # lease id, epoch, seconds
    RELEASE = "release"  # lease id, epoch
    STAGE = "stage"  # lease id
    STOP = "stop"


class Event:
    """Engine process -> front."""

    READY = "ready"  # what the engine holds
    FAILED = "failed"  # it cannot start: message
    STEP = "step"  # everything that one turn of the loop did


def pack(message: list[Any]) -> bytes:
    body: bytes = msgpack.packb(message, use_bin_type=True)
    return HEADER.pack(len(body)) + body


class FrameSocket:
    """The engine's end: blocking sends, and receives that never wait longer than asked."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._buffer = bytearray()

    def wake(self) -> None:
        """End a `receive` that waits. Safe to call from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        self._sock.close()
        os.close(self._wake_fd)

    def send(self, message: list[Any]) -> None:
        self._sock.sendall(pack(message))

    def receive(self, timeout_seconds: float) -> list[list[Any]]:
        """All complete messages that are here. With none, waits for bytes or `wake` at most so long.

        Raises ConnectionError when the front is gone.
        """
        messages: list[list[Any]] = []
        wait_ms = timeout_seconds * 1000
        while ready := dict(self._poll.poll(wait_ms)):
            wait_ms = 0
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._sock.fileno() in ready:
                data = self._sock.recv(1 << 20)
                if not data:
                    raise ConnectionError("the worker's front is gone")
                self._buffer += data
                messages.extend(self._take_complete())
        return messages

    def _take_complete(self) -> list[list[Any]]:
        messages, start = [], 0
        while len(self._buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                raise ConnectionError(f"frame of {size} bytes")
            end = start + HEADER.size + size
            if len(self._buffer) < end:
                break
            messages.append(msgpack.unpackb(bytes(self._buffer[start + HEADER.size : end])))
            start = end
        del self._buffer[:start]
        return messages


async def read_frame(reader: asyncio.StreamReader) -> list[Any]:
    """The front's end: one message. Raises asyncio.IncompleteReadError when the engine is gone."""
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if size > MAX_FRAME_BYTES:
        raise ConnectionError(f"frame of {size} bytes")
    message: list[Any] = msgpack.unpackb(await reader.readexactly(size))
    return message
