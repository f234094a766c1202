"""When to start a dead service again: a doubling delay, and an end to it. Pure; the clock is an argument."""

from __future__ import annotations

from collections import deque


class RestartPolicy:
    """Decides after each death of one service: seconds to wait, or None to give up.

    Delays double from `first_delay_seconds` with every death within `window_seconds`; the one after
    `max_restarts` such deaths is final. A service that stayed up for a whole window starts afresh.
    """

    def __init__(self, first_delay_seconds: float = 1.0, max_restarts: int = 5, window_seconds: float = 60.0) -> None:
        self._first_delay = first_delay_seconds
        self._max_restarts = max_restarts
        self._window = window_seconds
        self._deaths: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """The service died at `now`."""
        while self._deaths and now - self._deaths[0] > self._window:
            self._deaths.popleft()
        if len(self._deaths) >= self._max_restarts:
            return None
        self._deaths.append(now)
        return self._first_delay * 2.0 ** (len(self._deaths) - 1)
