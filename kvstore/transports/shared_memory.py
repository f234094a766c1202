"""Memory that processes share by passing a descriptor: a memfd, which has no name and dies with its last user.

Nothing is written to /dev/shm, so nothing is left behind after SIGKILL. The size is sealed: a mapping of a
peer's memory can never fault because the peer shrank it, not even after the peer's death.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.errors import ConfigError, TransferError

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create_memfd(name: str, num_bytes: int) -> int:
    """A zeroed memfd of `num_bytes` with sealed size; pages are taken when first written.

    Other users of the host cannot open it, and a descriptor that was passed read-only cannot be reopened for
    writing (mode 0400). Raises ConfigError when the machine does not have the memory.
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
    """Another descriptor of the same memory that cannot be mapped for writing. The caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def map_fd(fd: int, num_bytes: int, writable: bool) -> mmap.mmap:
    """Map the first `num_bytes` of a memfd, also one that a peer sent. Raises TransferError when it is not one
    of sealed size or too short, ConfigError when it cannot be mapped.
    """
    check_sealed(fd, num_bytes)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, protection)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"cannot map {num_bytes} bytes of shared memory") from error


def check_sealed(fd: int, num_bytes: int) -> None:
    """Raise TransferError unless it is a memfd of sealed size, of so many bytes at least."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransferError("the descriptor that was passed is not a memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK or num_bytes <= 0 or os.fstat(fd).st_size < num_bytes:
        raise TransferError("the memory that was passed is not of sealed size or shorter than it claims")


def blocks_over(buffer: mmap.mmap, num_blocks: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """A mapping as `[num_blocks, block_bytes]`; the mapping lives as long as the array."""
    return np.frombuffer(buffer, dtype=np.uint8, count=num_blocks * block_bytes).reshape(num_blocks, block_bytes)


def _available_bytes() -> int:
    """Memory that the kernel can still give, within the container's limit."""
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
