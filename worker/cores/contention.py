"""Thread count under CPU contention: how many threads are worth using while other programs want the cores.

Threads of one GEMM wait for the slowest of them. When the kernel takes the core of one, all of them wait, and a step
takes many times longer than with fewer threads (figures in docs/decisions/cpu-execution.md). The kernel counts the
time that a runnable thread waits for a core; `ThreadLimit` turns that into a number of threads. It knows neither
torch nor steps.
"""

from __future__ import annotations

import os

OBSERVE_SECONDS = 0.25
MAX_WAIT_SHARE = 0.1  # seconds of waiting for a core, all threads together, per second: more is contention
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


class ThreadLimit:
    """Fewer threads under contention; all of them again after a while, which doubles when that was too early."""

    def __init__(self) -> None:
        self._limit: int | None = None
        self._retry_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS

    def apply(self, num_threads: int) -> int:
        """Return how many of `num_threads` to use now."""
        return num_threads if self._limit is None else min(self._limit, num_threads)

    def observe(self, now: float, num_threads: int, wait_share: float) -> None:
        """Record that `num_threads` threads lacked `wait_share` cores on average in the last interval."""
        if wait_share > MAX_WAIT_SHARE and num_threads > 1:
            self._limit = max(1, num_threads - max(1, round(wait_share)))
            self._retry_at = now + self._retry_seconds
            self._retry_seconds = min(self._retry_seconds * 2, MAX_RETRY_SECONDS)
        elif self._limit is not None and now >= self._retry_at:
            self._limit = None
            self._retry_at = now + self._retry_seconds
        elif self._limit is None and now >= self._retry_at:
            self._retry_seconds = FIRST_RETRY_SECONDS  # all threads went well for as long as the last wait


class RunQueueWait:
    """Time that the threads of this process have spent runnable without a core."""

    def __init__(self) -> None:
        self._waits: dict[str, int] = {}
        self._last_time = 0.0

    def share_since_last(self, now: float) -> float | None:
        """Cores lacked on average since the last call; None when that was too recent, or not measured."""
        elapsed = now - self._last_time
        if elapsed < OBSERVE_SECONDS:
            return None
        self._last_time = now
        before, self._waits = self._waits, _waits_of_threads()
        if elapsed > 4 * OBSERVE_SECONDS or not before:  # idle in between: the share would say nothing
            return None
        waited = sum(wait - before.get(thread, wait) for thread, wait in self._waits.items())
        return waited / 1e9 / elapsed


def _waits_of_threads() -> dict[str, int]:
    """Nanoseconds by thread, from schedstat (time on a core, waiting for one, slices); empty where there is none."""
    waits = {}
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
                waits[thread] = int(file.read().split()[1])
    except (OSError, IndexError, ValueError):  # a thread that ends while it is read, or a kernel that does not count
        return {}
    return waits
