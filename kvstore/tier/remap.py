"""Maps another memfd where one is mapped: the memory of a node agent that has been restarted."""

from __future__ import annotations

import ctypes
import mmap
import os

from common.errors import ConfigError
from kvstore.transports.shared_memory import check_sealed

MAP_FIXED = 0x10  # of Linux; Python's mmap does not define it


def map_fd_in_place(fd: int, buffer: mmap.mmap) -> None:
    """Map a memfd writable over the one that `buffer` maps, so that views of `buffer` see the new memory.

    No one may read or write the memory meanwhile, or have it registered with a device. Raises as `map_fd`.
    """
    check_sealed(fd, len(buffer))
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
    if libc.mmap(address, len(buffer), protection, flags, fd, 0) != address:
        raise ConfigError(f"cannot map {len(buffer)} bytes of shared memory: {os.strerror(ctypes.get_errno())}")
