"""NCCL for tests without GPUs: sequential messages over a socket, in a thread that stands for a stream.

As with NCCL, a message whose peer does nothing never ends, and a peer's death goes unseen: only `abort` ends it.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from common.errors import TransferError

LENGTH = struct.Struct("<Q")


class FakeMark:
    def __init__(self, link: FakeLink, number: int) -> None:
        self._link = link
        self._number = number

    def query(self) -> bool:
        return self._link.num_done >= self._number


class FakeLink:
    """One end of a communicator."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self.sock = sock
        self.is_running = threading.Event()  # cleared: the device does nothing
        self.is_running.set()
        self.num_done = self.num_posted = 0
        self.num_aborts = 0
        self.kept: tuple[torch.Tensor, ...] = ()
        self.messages: list[int] = []  # bytes of posted messages
        self._work: deque[Callable[[], None]] = deque()
        self._has_work = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, data: torch.Tensor, deadline: float) -> None:
        def do() -> None:
            self.sock.sendall(LENGTH.pack(data.nbytes) + bytes_of(data).tobytes())

        self._post(data, do)

    def receive(self, data: torch.Tensor, deadline: float) -> None:
        def do() -> None:
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            assert length == data.nbytes, "messages of different lengths"
            bytes_of(data)[:] = np.frombuffer(self._read(length), np.uint8)

        self._post(data, do)

    def mark(self) -> FakeMark:
        return FakeMark(self, self.num_posted)

    def after(self, event: object) -> None:
        assert event is None

    def check(self) -> None:
        if self.num_aborts:
            raise TransferError("used after its end")

    def abort(self, *kept: torch.Tensor) -> None:
        self.num_aborts += 1
        self.kept += kept
        self.sock.close()

    def _post(self, data: torch.Tensor, do: Callable[[], None]) -> None:
        self.check()
        assert data.is_contiguous()
        self.num_posted += 1
        self.messages.append(data.nbytes)
        self._work.append(do)
        self._has_work.release()

    def _run(self) -> None:
        while True:
            self._has_work.acquire()
            self.is_running.wait()
            try:
                self._work.popleft()()
            except OSError:  # aborted, or the peer is: what is posted never ends
                return
            self.num_done += 1

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            if not more:
                raise ConnectionError("the peer is gone")
            data += more
        return bytes(data)


class FakeNccl:
    """NCCL on one `gpu`. Communicators' names are ports."""

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self.links: list[FakeLink] = []
        self.refuses = False
        self._listeners: dict[bytes, socket.socket] = {}

    def unique_id(self) -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        name = str(listener.getsockname()[1]).encode().ljust(128, b"\0")
        self._listeners[name] = listener
        return name

    def connect(self, unique_id: bytes, rank: int, deadline: float) -> FakeLink:
        if self.refuses:
            if rank == 1:
                self._listeners.pop(unique_id).close()
            raise TransferError("ncclCommInitRankConfig: unhandled system error")
        seconds = deadline - time.monotonic()
        try:
            if rank == 0:
                port = int(unique_id.rstrip(b"\0"))
                sock = socket.create_connection(("127.0.0.1", port), seconds)
            else:
                with self._listeners.pop(unique_id) as listener:
                    listener.settimeout(seconds)
                    sock, _ = listener.accept()
        except OSError as error:
            raise TransferError("the peer does not join") from error
        self.links.append(FakeLink(sock))
        return self.links[-1]


def bytes_of(data: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return data.view(-1).view(torch.uint8).numpy()
