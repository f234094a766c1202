"""Admission: refuse requests whose answer would come too late. Pure; predictions are the policy's.

A refusal at once is worth more to a client than an answer after it has given up, and the work that is not begun goes
to those who are still waiting.
"""

from __future__ import annotations

import math

from common.errors import OverloadedError
from router.routing.views import EXPECTED_TOKENS, Candidate

MARGIN = 0.9  # of the time left: predictions err, and most of what is admitted must be in time
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


def check_in_time(chosen: Candidate, seconds_left: float, max_wait_seconds: float) -> None:
    """Raise OverloadedError when the wait, or wait and answer, would take longer than they may.

    seconds_left: until the request's deadline. Without measured rates nothing is refused. A client should come back
    when those who wait now are served: `late` seconds from now others have taken the room.
    """
    if not chosen.is_measured:
        return
    queueing = chosen.terms["queue"] + chosen.terms["slot"]
    wait, service = chosen.wait_seconds, chosen.service_seconds
    time_left = MARGIN * seconds_left
    if wait - queueing + service > time_left:  # too long on an idle server, too: cut by its deadline, not refused
        service = 0.0
    late = max(wait - max_wait_seconds, wait + service - time_left)
    if queueing > 0 and late > 0:
        raise OverloadedError(f"the queue is too long: this answer would be {late:.1f} s late", max(late, queueing))
