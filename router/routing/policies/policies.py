"""Policies without predictions. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from router.routing.views import Candidate, RequestView


def round_robin(request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
    return candidates[request.turn % len(candidates)]


def power_of_two(request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
    """Draw two candidates at random; take the less loaded one."""
    count = len(candidates)
    pair_index = int(request.draw * count * count)
    first, second = candidates[pair_index // count], candidates[pair_index % count]
    return first if first.load <= second.load else second


def session_sticky(request: RequestView, candidates: Sequence[Candidate]) -> Candidate | None:
    """Choose equal workers for equal sessions, by rendezvous hashing. Without a session, no preference."""
    if not request.session:
        return None

    def rank(candidate: Candidate) -> bytes:
        name = f"{request.session}\0{candidate.prefill or ''}\0{candidate.decode}"
        return hashlib.sha256(name.encode()).digest()

    return max(candidates, key=rank)


OTHER_POLICIES: dict[str, Callable[[RequestView, Sequence[Candidate]], Candidate | None]] = {
    "round-robin": round_robin,
    "random": RequestView.drawn,
    "power-of-two": power_of_two,
    "session-sticky": session_sticky,
}
