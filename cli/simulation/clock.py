"""Simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Runs actions in order of time; actions at the same time run in the order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def at(self, moment: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(moment, self.now), next(self._order), action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self.now + seconds, action)

    def run(self) -> None:
        """Run until no action is left."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
