"""Frames over TCP between the engine and a pipeline's first stage on another host: plans there, hidden states back.

A frame is a little-endian uint32 length and that many bytes, as in the ring between processes of one host.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from engine.tensor_parallel.plan_ring import CHECK_SECONDS, LENGTH

UNANSWERED_MS = 10_000  # after which a host that acknowledges no bytes counts as gone
KEEPALIVE_SECONDS = 2


def watch_peer(sock: socket.socket) -> None:
    """Let the kernel detect that the other host is gone, also while nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)


def send_frame(sock: socket.socket, data: bytes) -> None:
    sock.sendall(LENGTH.pack(len(data)))
    sock.sendall(data)


def receive_frame(sock: socket.socket, check: Callable[[], None] | None = None, begun: bytes = b"") -> bytearray:
    """Receive the next frame. Raises ConnectionError if the peer has gone.

    check: called while nothing comes. begun: bytes of the frame's length that the caller has read.
    """
    (length,) = LENGTH.unpack(begun + _receive(sock, LENGTH.size - len(begun), check))
    return _receive(sock, length, check)


def _receive(sock: socket.socket, num_bytes: int, check: Callable[[], None] | None) -> bytearray:
    data = bytearray(num_bytes)
    left = memoryview(data)
    while left:
        if check is not None:
            while not select.select([sock], [], [], CHECK_SECONDS)[0]:
                check()
        count = sock.recv_into(left)
        if not count:
            raise ConnectionError("the other side is gone")
        left = left[count:]
    return data


class SocketSource:
    """See HiddenSource. The caller waits, as bytes pass through host memory."""

    def __init__(self, sock: socket.socket, check: Callable[[], None]) -> None:
        self._sock = sock
        self._check = check

    def receive(self, hidden: Tensor) -> None:
        data = receive_frame(self._sock, self._check)
        hidden.copy_(torch.frombuffer(data, dtype=hidden.dtype).view(hidden.shape))


class SocketSink:
    """See HiddenSink. A thread sends: if both sides were blocked sending, neither would read."""

    def __init__(self, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        self._sock = sock
        self._on_lost = on_lost
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # at most as many as steps in flight
        threading.Thread(target=self._send_all, name="hidden", daemon=True).start()

    def send(self, hidden: Tensor) -> None:
        self._frames.put(hidden.contiguous().cpu().view(torch.uint8).numpy().tobytes())

    def _send_all(self) -> None:
        try:
            while True:
                send_frame(self._sock, self._frames.get())
        except OSError:
            self._on_lost()
