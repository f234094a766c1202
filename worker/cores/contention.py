"""Number of threads to use while other programs compete for the cores.

Threads of one GEMM wait for the slowest of them. When the kernel takes away the core of one, all of them wait, and a
step takes many times longer than with fewer threads (figures in docs/decisions/cpu-execution.md). The kernel counts
the time that a runnable thread waits for a core; `ThreadLimit` converts it to a number of threads. Knows neither
torch nor steps.
"""

from __future__ import annotations

import os

OBSERVE_SECONDS = 0.25
MAX_WAIT_SHARE = 0.1  # seconds that all threads together wait for a core, per second; more counts as contention
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


class ThreadLimit:
    """Lowers the number of threads under contention, and tries all again after a delay, doubled if that was too
    early."""

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
            self._retry_seconds = FIRST_RETRY_SECONDS  # all threads ran well for as long as the last delay


class RunQueueWait:
    """Time that this process's threads have been runnable without a core."""

    def __init__(self) -> None:
        self._waits: dict[str, int] = {}
        self._last_time = 0.0

    def share_since_last(self, now: float) -> float | None:
        """Return the mean number of missing cores since the last call; None if too recent or not measured."""
        elapsed = now - self._last_time
        if elapsed < OBSERVE_SECONDS:
            return None
        self._last_time = now
        before, self._waits = self._waits, _waits_of_threads()
        if elapsed > 4 * OBSERVE_SECONDS or not before:  # idle in between: the share would mean nothing
            return None
        waited = sum(wait - before.get(thread, wait) for thread, wait in self._waits.items())
        return waited / 1e9 / elapsed


def _waits_of_threads() -> dict[str, int]:
    """Return nanoseconds by thread, from schedstat (time on a core, waiting for one, slices); empty without it."""
    waits = {}
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
                waits[thread] = int(file.read().split()[1])
    except (OSError, IndexError, ValueError):  # a thread that ends while it is read, or a kernel without the counter
        return {}
    return waits
