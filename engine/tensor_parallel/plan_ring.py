"""A stream of frames from one process to several, through shared memory. Knows no plans.

    header    uint64 bytes written, then for each reader uint64 bytes read, of the whole stream
    data      byte i of the stream is at i modulo the capacity

A frame is a little-endian uint32 length and that many bytes. Each reader sleeps on its eventfd. The writer waits for
the slowest reader only if the ring is full. Both ends of a ring are on one host and trust each other.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from collections.abc import Callable

CAPACITY = 4 << 20  # bytes: thousands of decode plans of 64 rows, or a prompt of 800k tokens
FULL_WAIT_SECONDS = 50e-6
CHECK_SECONDS = 0.5
LENGTH = struct.Struct("<I")
COUNTER_BYTES = 8


def ring_bytes(num_readers: int, capacity: int = CAPACITY) -> int:
    """Return the size of the shared memory."""
    return COUNTER_BYTES * (1 + num_readers) + capacity


class _Ring:
    def __init__(self, memory_fd: int, num_readers: int, capacity: int) -> None:
        self._memory = mmap.mmap(memory_fd, ring_bytes(num_readers, capacity))
        self._base = COUNTER_BYTES * (1 + num_readers)
        # An item of this view is one 8-byte load or store; struct.pack_into would write zeros first, visible to
        # peers.
        self._counters = memoryview(self._memory)[: self._base].cast("Q")
        self._capacity = capacity

    def _span(self, position: int, num_bytes: int) -> slice:
        """Return the part of [position, position + num_bytes) that is contiguous in the ring."""
        first = position % self._capacity
        return slice(self._base + first, self._base + min(first + num_bytes, self._capacity))

    def close(self) -> None:
        self._counters.release()
        self._memory.close()


class RingWriter(_Ring):
    """The writing end. `check` is called while the ring stays full, and raises if a reader has ended."""

    def __init__(
        self, memory_fd: int, wake_fds: list[int], check: Callable[[], None], capacity: int = CAPACITY
    ) -> None:
        """wake_fds: an eventfd per reader."""
        super().__init__(memory_fd, len(wake_fds), capacity)
        self._wake_fds = wake_fds
        self._check = check
        self._written = 0

    def write(self, frame: bytes) -> None:
        """Send a frame to all readers."""
        data = memoryview(LENGTH.pack(len(frame)) + frame)
        while data:
            free = self._wait_for_room()
            span = self._span(self._written, min(free, len(data)))
            size = span.stop - span.start
            self._memory[span] = data[:size]
            data = data[size:]
            self._written += size
            self._counters[0] = self._written
            if not data or free == size:
                for fd in self._wake_fds:
                    os.eventfd_write(fd, 1)

    def _wait_for_room(self) -> int:
        """Wait for room, and return how many bytes may be written, at least one."""
        next_check = time.monotonic() + CHECK_SECONDS
        while True:
            read = min(self._counters[1 + index] for index in range(len(self._wake_fds)))
            if free := self._capacity - (self._written - read):
                return free
            time.sleep(FULL_WAIT_SECONDS)
            if time.monotonic() > next_check:
                self._check()
                next_check = time.monotonic() + CHECK_SECONDS


class RingReader(_Ring):
    """Reading end `index` of `num_readers`."""

    def __init__(
        self,
        memory_fd: int,
        wake_fd: int,
        index: int,
        num_readers: int,
        capacity: int = CAPACITY,
        check: Callable[[], None] | None = None,
    ) -> None:
        """check: called while nothing comes; raises if the writer has ended."""
        super().__init__(memory_fd, num_readers, capacity)
        self._check = check
        self._wake_fd = wake_fd
        self._index = index
        self._read = 0

    def read(self) -> bytes:
        """Wait for the next frame and return it."""
        (length,) = LENGTH.unpack(self._take(LENGTH.size))
        return self._take(length)

    def _wait(self) -> None:
        """Wait until the writer has woken this end."""
        if self._check is not None:
            while not select.select([self._wake_fd], [], [], CHECK_SECONDS)[0]:
                self._check()
        os.eventfd_read(self._wake_fd)

    def _take(self, num_bytes: int) -> bytes:
        pieces: list[bytes] = []
        while num_bytes:
            available = self._counters[0] - self._read
            if not available:
                self._wait()
                continue
            piece = self._memory[self._span(self._read, min(available, num_bytes))]
            pieces.append(piece)
            num_bytes -= len(piece)
            self._read += len(piece)
            self._counters[1 + self._index] = self._read
        return b"".join(pieces)
