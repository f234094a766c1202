"""What is measured of all requests of a model: how long answers are, how fast those that wait are served. Pure."""

from __future__ import annotations

import math

from router.routing.views import EXPECTED_TOKENS

WEIGHT = 0.05  # of the newest answer in the mean length
FADE_SECONDS = 5.0  # with choices waiting, after which a first token counts for a third in the drain rate


class AnswerLength:
    """Mean number of tokens of answers; 0: none yet."""

    def __init__(self) -> None:
        self.mean = 0.0

    def observe(self, num_tokens: int) -> None:
        self.mean = num_tokens if self.mean == 0 else self.mean + WEIGHT * (num_tokens - self.mean)

    def expected(self, max_tokens: int) -> float:
        """Expected length of an answer that may have `max_tokens`."""
        return min(self.mean or EXPECTED_TOKENS, max_tokens)

    def left(self, max_tokens: int, num_tokens: int) -> float:
        """Expected tokens of an answer after its first `num_tokens`: a quarter of the mean when it is longer."""
        mean = self.mean or EXPECTED_TOKENS
        return min(max(mean - num_tokens, mean / 4), max_tokens - num_tokens)


class DrainRate:
    """How fast choices get their first tokens while others wait: a model's queue empties as fast."""

    def __init__(self) -> None:
        self._num_left = 0.0  # first tokens, and the time that they took, faded
        self._seconds = 0.0
        self._since = 0.0  # the last first token, or since when there is a queue

    def began(self, now: float) -> None:
        """Note that a choice waits, where none did."""
        self._since = max(self._since, now)

    def observe(self, now: float) -> None:
        """Count a first token."""
        interval = now - self._since
        kept = math.exp(-interval / FADE_SECONDS)
        self._num_left = kept * self._num_left + 1
        self._seconds = kept * self._seconds + interval
        self._since = now

    def seconds(self, num_waiting: int, now: float) -> float:
        """Expected time until so many that wait now have their first tokens; 0 before the first measurement."""
        if not self._num_left:
            return 0.0
        return num_waiting * (self._seconds + now - self._since) / self._num_left
