"""Refuse requests whose answer would come too late. Pure; the policy makes the predictions.

An early refusal is worth more to a client than an answer after it has given up, and the work saved goes to requests
that can still be in time.
"""

from __future__ import annotations

from common.errors import OverloadedError
from router.routing.views import Candidate

MARGIN = 0.9  # of the time left: predictions have errors, and most admitted requests must be in time


def check_in_time(chosen: Candidate, seconds_left: float, max_wait_seconds: float) -> None:
    """Raise OverloadedError if the wait, or wait plus answer, is predicted to take too long.

    seconds_left: until the request's deadline. Nothing is refused without measured rates. The retry time is when the
    requests that wait now are served: in `late` seconds, others would have taken the room.
    """
    if not chosen.is_measured:
        return
    queueing = chosen.terms["queue"] + chosen.terms["slot"]
    wait, service = wait_seconds(chosen), chosen.terms["decode"]
    time_left = MARGIN * seconds_left
    if wait - queueing + service > time_left:  # too long even on an idle server: cut off by its deadline, not refused
        service = 0.0
    late = max(wait - max_wait_seconds, wait + service - time_left)
    if queueing > 0 and late > 0:
        raise OverloadedError(f"the queue is too long: this answer would be {late:.1f} s late", max(late, queueing))


def wait_seconds(chosen: Candidate) -> float:
    """Predict the time until decoding begins."""
    return sum(chosen.terms.get(name, 0.0) for name in ("queue", "compute", "pull", "slot"))
