"""A worker that fails again and again gets no requests for a while. Pure; the clock comes as an argument."""

from __future__ import annotations

MAX_FAILURES = 3
WINDOW_SECONDS = 5.0
OPEN_SECONDS = 5.0


class Breaker:
    """Opens after MAX_FAILURES failures within WINDOW_SECONDS, for OPEN_SECONDS."""

    def __init__(self) -> None:
        self._failures: list[float] = []
        self._open_until = 0.0

    def record_failure(self, now: float) -> None:
        self._failures = [time for time in self._failures if now - time < WINDOW_SECONDS]
        self._failures.append(now)
        if len(self._failures) >= MAX_FAILURES:
            self._open_until = now + OPEN_SECONDS
            self._failures.clear()

    def record_success(self) -> None:
        self._failures.clear()

    def is_open(self, now: float) -> bool:
        return now < self._open_until
