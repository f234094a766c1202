"""Memory that processes share by passing a descriptor: a memfd, which has no name and is freed with its last user.

Nothing is written to /dev/shm, so nothing remains after SIGKILL. The size is sealed, so a mapping of a peer's memory
can never fault because the peer shrank it, not even after the peer's death.

A thread of the owner hands out a pool's descriptor over a Unix socket: a client that can open the socket (a process
of the owner's user) receives one frame, {"pool": PoolInfo}, with the descriptor. Then the connection ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.errors import ConfigError, TransferError
from kvstore.handle.handle import PoolInfo, from_wire
from kvstore.transports.sockets import UnixListener, accepted, connect_unix, recv_frame, send_frame

MAX_INFO_BYTES = 1 << 16
SEND_TIMEOUT_SECONDS = 1.0
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create_memfd(name: str, num_bytes: int) -> int:
    """Create a zeroed memfd of `num_bytes` with sealed size; pages are allocated when they are first written.

    Other users of the host cannot open it, and a read-only descriptor of it cannot be reopened for writing
    (mode 0400). Raises ConfigError if the machine does not have the memory.
    """
    available = _available_bytes()
    if num_bytes > available:
        raise ConfigError(
            f"{num_bytes / 2**30:.2f} GiB of memory wanted for {name}, {available / 2**30:.2f} GiB available: "
            "lower --kv-cache-gb or --host-tier-gb"
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        os.fchmod(fd, 0o400)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"cannot reserve {num_bytes} bytes for {name}: {error.strerror}") from error
    return fd


def reopen_read_only(fd: int) -> int:
    """Return another descriptor of the memory, which cannot be mapped for writing. The caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def map_fd(fd: int, num_bytes: int, writable: bool) -> mmap.mmap:
    """Map the first `num_bytes` of a memfd, which a peer may have sent.

    Raises TransferError unless it is a memfd of sealed and sufficient size, ConfigError if it cannot be mapped.
    """
    check_sealed(fd, num_bytes)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, protection)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"cannot map {num_bytes} bytes of shared memory") from error


def check_sealed(fd: int, num_bytes: int) -> None:
    """Raise TransferError unless the descriptor is a memfd of sealed size with at least `num_bytes`."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransferError("the descriptor that was passed is not a memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK or num_bytes <= 0 or os.fstat(fd).st_size < num_bytes:
        raise TransferError("the memory that was passed is not of sealed size or shorter than it claims")


def blocks_over(buffer: mmap.mmap, num_blocks: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Return a mapping as an array `[num_blocks, block_bytes]`, which keeps the mapping alive."""
    return np.frombuffer(buffer, dtype=np.uint8, count=num_blocks * block_bytes).reshape(num_blocks, block_bytes)


def _available_bytes() -> int:
    """Return the memory that the kernel can still provide, or the container's limit if that is lower."""
    limits = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    container_limit = Path("/sys/fs/cgroup/memory.max")
    if container_limit.is_file():
        text = container_limit.read_text().strip()
        if text.isdigit():
            limits.append(int(text))
    return min(limits, default=1 << 62)


class DescriptorServer:
    """Serves `fd`, which it owns, until `close`. It reads nothing from clients.

    Serves one client at a time, and drops a client that does not read. Raises ConfigError if the socket path cannot
    be used.
    """

    def __init__(self, socket_path: Path, info: PoolInfo, fd: int) -> None:
        self.socket_path = socket_path
        self._message = {"pool": info}
        self._fd = fd
        try:
            self._listener = UnixListener(socket_path)
        except BaseException:  # Ctrl-C and cancelled tasks, too: do not leak the descriptor
            os.close(self._fd)
            raise
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="kv-descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and remove the socket. Descriptors that clients have stay valid."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.sock.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join()
        self._listener.close()
        os.close(self._fd)

    def _serve(self) -> None:
        for client in accepted(self._listener.sock, lambda: self._closing, "KV descriptors"):
            try:
                client.settimeout(SEND_TIMEOUT_SECONDS)
                send_frame(client, self._message, [self._fd])
            except OSError:  # the client has gone, or does not read
                client.close()
            else:
                self.served(client)

    def served(self, client: socket.socket) -> None:
        """Close a connection after everything was sent."""
        client.close()


def fetch_pool(socket_path: str, timeout_seconds: float) -> tuple[PoolInfo, int]:
    """Fetch the pool's description and descriptor from a DescriptorServer. The caller closes the descriptor.

    Raises UnavailableError (no server), TransferError or HandshakeError (another kind of server).
    """
    with connect_unix(socket_path, timeout_seconds) as sock:
        return receive_pool(sock)


def receive_pool(sock: socket.socket) -> tuple[PoolInfo, int]:
    """Receive the frame of a DescriptorServer, see `fetch_pool`."""
    fds: list[int] = []
    try:
        message, fds = recv_frame(sock, MAX_INFO_BYTES, max_fds=1)
        if not isinstance(message, dict) or "pool" not in message or len(fds) != 1:
            raise TransferError("the Unix socket does not hand out a KV pool")
        return from_wire(PoolInfo, message["pool"], "description of a KV pool"), fds[0]
    except BaseException:  # Ctrl-C and cancelled tasks, too: do not leak descriptors
        for fd in fds:
            os.close(fd)
        raise
