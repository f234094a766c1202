"""Restart backoff: how long to wait before a dead service is restarted. Pure; knows no clock and no process."""

from __future__ import annotations


class RestartPolicy:
    """Decides after each death of one service how long to wait. It never gives up.

    The first restart is immediate, because open streams wait for it. Every further death doubles the delay, from
    `first_delay_seconds` to `max_delay_seconds`. A service that was ready for longer than that starts afresh.
    """

    def __init__(self, first_delay_seconds: float = 0.5, max_delay_seconds: float = 10.0) -> None:
        self._first_delay = first_delay_seconds
        self._max_delay = max_delay_seconds
        self._delay = 0.0

    def next_delay(self, ready_seconds: float) -> float:
        """Seconds to wait after a death. `ready_seconds`: how long the service had been ready; 0: it never was."""
        delay = 0.0 if ready_seconds > self._max_delay else self._delay
        self._delay = min(max(self._first_delay, 2 * delay), self._max_delay)
        return delay
