"""The cores of a host, divided equally between the engines that compute right now (decision 0093).

An engine that computes holds a lock on its byte of a file that the workers of a host share; the kernel gives it up
for one that dies. Others count such locks before each step, and torch's threads follow. Under foreign load it uses
fewer threads (`contention`). Knows nothing of what is computed.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

import torch

from worker.contention import RunQueueWait, ThreadLimit

NUM_PLACES = 64  # engines of one host; what more there are counts for nobody
_FLOCK = struct.Struct("@hhqqi0q")  # of <fcntl.h>: type, whence, start, length, process


class SharedCores:
    """One engine's part in the file `path`. `adjust` before every step."""

    def __init__(self, path: Path, num_cores: int) -> None:
        """num_cores: all that may be used. Raises OSError."""
        self._num_cores = num_cores
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._place: int | None = None  # of the lock that is held
        self._run_queue = RunQueueWait()
        self._limit = ThreadLimit()

    def adjust(self, has_work: bool) -> None:
        """Let torch use what is this engine's part now, or leave it to others."""
        if not has_work:
            self.release()
            return
        now = time.monotonic()
        wait_share = self._run_queue.share_since_last(now)
        if wait_share is not None:
            self._limit.observe(now, torch.get_num_threads(), wait_share)
        num_threads = self._limit.apply(self.share())
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)  # of this thread's products; takes 10 us

    def share(self) -> int:
        """How many cores the next step may use. From now on this engine counts."""
        if self._place is None:
            self._place = self._take_place()
        return max(1, self._num_cores // (1 + self._num_others()))

    def release(self) -> None:
        """This engine does not count any more."""
        if self._place is not None:
            self._lock(fcntl.F_UNLCK, self._place)
            self._place = None

    def close(self) -> None:
        os.close(self._file)

    def _take_place(self) -> int | None:
        for place in range(NUM_PLACES):
            try:
                self._lock(fcntl.F_WRLCK, place)
            except BlockingIOError:
                continue
            return place
        return None

    def _num_others(self, first: int = 0, stop: int = NUM_PLACES) -> int:
        """Locks of others in places first .. stop - 1."""
        found = self._lock_of_another(first, stop) if first < stop else None
        if found is None:
            return 0
        return 1 + self._num_others(first, found) + self._num_others(found + 1, stop)

    # Locks of open file descriptions: a lock of a process would end with any descriptor of the file.

    def _lock(self, kind: int, place: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))

    def _lock_of_another(self, first: int, stop: int) -> int | None:
        """The place of one of them, whichever."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, stop - first, 0)
        kind, _, place, _, _ = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else place
