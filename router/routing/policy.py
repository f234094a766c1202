"""Routing policies: which workers serve a request. Pure: all inputs are arguments, randomness included."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import UnavailableError
from router.objectives.objectives import Objectives
from router.objectives.placement import admissible, placements_for
from router.routing.costs import candidates_for
from router.routing.views import Candidate, RequestView, WorkerView

NEAR = 1.1  # costs within 10% are equal: measured step times of equal workers differ by that much


@dataclass(frozen=True, slots=True)
class Decision:
    """The candidate that was chosen, and all that were considered."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    policy: str


def choose(
    policy: str,
    request: RequestView,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    local_prefill_tokens: int,
    objectives: Objectives = Objectives(),  # noqa: B008 - frozen
) -> Decision:
    """The decision for one request; `policy` is one of POLICIES. Raises UnavailableError without a decode worker.

    Of `cost` alone: with objectives, roles are preferences and every placement is a candidate.
    """
    if not decode:
        raise UnavailableError("no decode worker is available")
    if objectives and policy == "cost":
        candidates = placements_for(request, prefill, decode, local_prefill_tokens, objectives)
        chosen = cheapest(request, admissible(candidates))
        if objectives.ttft and chosen.ttft_seconds > objectives.ttft:
            candidates = placements_for(request, prefill, decode, local_prefill_tokens, objectives, is_late=True)
            chosen = cheapest(request, admissible(candidates))
        return Decision(chosen, tuple(candidates), policy)
    candidates = candidates_for(request, prefill, decode, local_prefill_tokens)
    return Decision(POLICIES[policy](request, candidates), tuple(candidates), policy)


def cheapest(request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
    """The lowest cost. Ties go to the least loaded, then to the longest cached prefix, then at random."""
    limit = min(candidate.cost for candidate in candidates) * NEAR
    near = [candidate for candidate in candidates if candidate.cost <= limit]
    best = max((-candidate.load, candidate.cached_tokens) for candidate in near)
    return at_random(request, [c for c in near if (-c.load, c.cached_tokens) == best])


def round_robin(request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
    return candidates[request.turn % len(candidates)]


def at_random(request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
    return candidates[min(int(request.draw * len(candidates)), len(candidates) - 1)]


def power_of_two(request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
    """Two at random, the less loaded one of them."""
    count = len(candidates)
    pair_index = int(request.draw * count * count)
    first, second = candidates[pair_index // count], candidates[pair_index % count]
    return first if first.load <= second.load else second


def session_sticky(request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
    """Equal workers for equal sessions, by rendezvous hashing; without a session, the cheapest."""
    if not request.session:
        return cheapest(request, candidates)

    def rank(candidate: Candidate) -> bytes:
        name = f"{request.session}\0{candidate.prefill or ''}\0{candidate.decode}"
        return hashlib.sha256(name.encode()).digest()

    return max(candidates, key=rank)


# Each picks one of at least one candidates.
POLICIES: dict[str, Callable[[RequestView, Sequence[Candidate]], Candidate]] = {
    "cost": cheapest,
    "round-robin": round_robin,
    "random": at_random,
    "power-of-two": power_of_two,
    "session-sticky": session_sticky,
}
