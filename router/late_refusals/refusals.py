"""Refuse requests whose answer would come too late. Pure; predictions are the policy's.

A refusal at once is worth more to a client than an answer after it has given up, and the work that is not begun goes
to those who are still waiting.
"""

from __future__ import annotations

from common.errors import OverloadedError
from router.routing.views import Candidate

MARGIN = 0.9  # of the time left: predictions err, and most of what is admitted must be in time


def check_in_time(chosen: Candidate, seconds_left: float, max_wait_seconds: float) -> None:
    """Raise OverloadedError when the wait, or wait and answer, would take longer than they may.

    seconds_left: until the request's deadline. Without measured rates nothing is refused. A client should come back
    when those who wait now are served: `late` seconds from now others have taken the room.
    """
    if not chosen.is_measured:
        return
    queueing = chosen.terms["queue"] + chosen.terms["slot"]
    wait, service = wait_seconds(chosen), chosen.terms["decode"]
    time_left = MARGIN * seconds_left
    if wait - queueing + service > time_left:  # too long on an idle server, too: cut by its deadline, not refused
        service = 0.0
    late = max(wait - max_wait_seconds, wait + service - time_left)
    if queueing > 0 and late > 0:
        raise OverloadedError(f"the queue is too long: this answer would be {late:.1f} s late", max(late, queueing))


def wait_seconds(chosen: Candidate) -> float:
    """Predicted time until decoding begins."""
    return sum(chosen.terms.get(name, 0.0) for name in ("queue", "compute", "pull", "slot"))
