"""Divides the cores of a host equally among the engines that compute right now (docs/decisions/cpu-execution.md).

An engine that computes holds a lock on its byte of a file that the host's workers share; the kernel releases the
locks of a dead process. Each engine counts the others' locks before each step and sets torch's threads accordingly.
Under foreign load it uses fewer (`contention`). Knows nothing of the computation.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

import torch

from common.errors import ConfigError
from worker.cores.contention import RunQueueWait, ThreadLimit

NUM_SLOTS = 64  # engines of one host; more are not counted
_FLOCK = struct.Struct("@hhqqi0q")  # of <fcntl.h>: type, whence, start, length, process


class SharedCores:
    """One engine's share of the cores, through the lock file `path`. Call `adjust` before every step."""

    def __init__(self, path: Path, num_cores: int) -> None:
        """num_cores: cores that all engines may use together. Raises OSError."""
        self._num_cores = num_cores
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._slot: int | None = None  # slot of the lock that is held
        self._run_queue = RunQueueWait()
        self._limit = ThreadLimit()

    def adjust(self, has_work: bool) -> None:
        """Set torch's threads to this engine's current share, or release the share without work."""
        if not has_work:
            self.release()
            return
        now = time.monotonic()
        wait_share = self._run_queue.share_since_last(now)
        if wait_share is not None:
            self._limit.observe(now, torch.get_num_threads(), wait_share)
        num_threads = self._limit.apply(self.share())
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)  # for this thread's GEMMs; takes 10 us

    def share(self) -> int:
        """Take a share, and return how many cores the next step may use."""
        if self._slot is None:
            self._slot = self._take_slot()
        return max(1, self._num_cores // (1 + self._num_others()))

    def release(self) -> None:
        """Release this engine's share."""
        if self._slot is not None:
            self._lock(fcntl.F_UNLCK, self._slot)
            self._slot = None

    def close(self) -> None:
        os.close(self._file)

    def _take_slot(self) -> int | None:
        for slot in range(NUM_SLOTS):
            try:
                self._lock(fcntl.F_WRLCK, slot)
            except BlockingIOError:
                continue
            return slot
        return None

    def _num_others(self, first: int = 0, stop: int = NUM_SLOTS) -> int:
        """Return the number of other engines' locks in slots first .. stop - 1."""
        found = self._lock_of_another(first, stop) if first < stop else None
        if found is None:
            return 0
        return 1 + self._num_others(first, found) + self._num_others(found + 1, stop)

    # Locks of open file descriptions: a process's lock would end when any descriptor of the file is closed.

    def _lock(self, kind: int, slot: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0))

    def _lock_of_another(self, first: int, stop: int) -> int | None:
        """Return the slot of any lock that another engine holds in the range."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, stop - first, 0)
        kind, _, slot, _, _ = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else slot


def join_cores(run_dir: str) -> SharedCores:
    """Join the cores shared on this host, with a share for loading, which also computes. Raises ConfigError."""
    try:
        cores = SharedCores(Path(run_dir, "cores"), torch.get_num_threads())
        cores.adjust(has_work=True)
    except OSError as error:  # also for a folder without locks
        raise ConfigError(f"--run-dir {run_dir}, to share cores: {error.strerror}; or give --num-threads") from None
    return cores
