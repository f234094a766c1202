"""Message frames between a worker's front and its engine process, over a Unix socket pair.

Both ends belong to one worker, so a malformed frame is a bug and ends the connection.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket

import msgspec

from kvstore.transports.sockets import HEADER, body_size, pack, read_frame, unpack
from worker.messages import Message, ToEngine, ToFront

MAX_FRAME_BYTES = 256 << 20
SOCKET_BUFFER_BYTES = 4 << 20  # holds a step's frame, so that the engine need not wait for the front
_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)
_TO_FRONT = msgspec.msgpack.Decoder(ToFront)


class FrameSocket:
    """The engine process's end: blocking sends, and receives with a timeout."""

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

    def send(self, message: Message) -> None:
        self._sock.sendall(pack(message))

    def receive(self, timeout_seconds: float) -> list[ToEngine]:
        """Return all complete messages; if there is no data, wait for some or for `wake` until the timeout.

        Raises ConnectionError when the front is gone, TransferError for a malformed frame.
        """
        messages: list[ToEngine] = []
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

    def _take_complete(self) -> list[ToEngine]:
        messages, start = [], 0
        while (body := start + HEADER.size) <= len(self._buffer):
            end = body + body_size(self._buffer[start:body], MAX_FRAME_BYTES)
            if end > len(self._buffer):
                break
            messages.append(unpack(self._buffer[body:end], _TO_ENGINE))
            start = end
        del self._buffer[:start]
        return messages


async def read_message(reader: asyncio.StreamReader) -> ToFront:
    """Read one message in the front. Raises EOFError or TransferError when the engine process is gone."""
    message: ToFront = await read_frame(reader, MAX_FRAME_BYTES, _TO_FRONT)
    return message
