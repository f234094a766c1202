"""Routing policy: which workers serve a request. Pure: all inputs are arguments, randomness included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Protocol, TypeVar

from common.errors import UnavailableError
from common.wings import has_wing
from kvstore.types import WorkerId
from router.routing.predictor import Predictor
from router.routing.views import Candidate, RequestView, WorkerView

NEAR = 1.1  # decode times within 10% are equal, as are the rests of costs: measured times of equal workers differ so
MOST = 32  # workers of a role that are looked at: those with the longest cached prefix, then the least loaded


@dataclass(frozen=True, slots=True)
class Decision:
    """The candidate that was chosen, and all that were considered, for an answer of the expected length."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    policy: str
    expected_tokens: float = 0.0


class Assignable(Protocol):
    """What is known of a worker without a prediction."""

    @property
    def worker_id(self) -> WorkerId: ...

    @property
    def assigned(self) -> tuple[int, int]:
        """Prompt tokens to compute and requests, by the router's own count."""


W = TypeVar("W", bound=Assignable)


def shortlist(policy: str, workers: Sequence[W], request: RequestView) -> Sequence[W]:
    """The workers of many that are worth a prediction: a decision must not take longer the larger the cluster is.

    The cost policy looks at MOST of many: half by cached prefix, as far as there are such, the rest by load. The turn
    of the request says with which of equal workers to begin. Other policies choose among all.
    """
    if policy != "cost" or len(workers) <= MOST:
        return workers
    cached = request.cached_tokens
    caching = [worker for worker in workers if cached.get(worker.worker_id)]
    best = nsmallest(MOST // 2, caching, key=lambda worker: (-cached[worker.worker_id], worker.assigned))
    chosen = {worker.worker_id for worker in best}
    first = request.turn % len(workers)
    turned = [worker for worker in (*workers[first:], *workers[:first]) if worker.worker_id not in chosen]
    return [*best, *nsmallest(MOST - len(best), turned, key=lambda worker: worker.assigned)]


def choose(
    policy: str,
    request: RequestView,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    local_prefill_tokens: int,
    predictor: Callable[[RequestView, Sequence[WorkerView], int], Predictor] = Predictor,
) -> Decision:
    """The decision for one request; `policy` is one of POLICIES. Raises UnavailableError without a decode worker.

    A decode worker computes a prompt itself when the part that its cache lacks is short, or when there is no prefill
    worker; else every pair of workers is a candidate.
    """
    if not decode:
        raise UnavailableError("no decode worker is available")
    predict = predictor(request, [*prefill, *decode], local_prefill_tokens)
    alone = [w for w in decode if not prefill or request.num_tokens - request.cached_on(w) <= local_prefill_tokens]
    candidates = [predict.on_one_worker(worker) for worker in alone] or predict.disaggregated(prefill, decode)
    chosen = POLICIES[policy](request, candidates) or cheapest(request, candidates)
    return Decision(chosen, tuple(candidates), policy, request.expected_tokens)


def cheapest(request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
    """The lowest cost. Ties go to the least loaded, then to the longest cached prefix, then at random.

    Decode times, most of a cost, are compared apart: their errors would hide what a cached prefix saves.
    """
    fastest = min(candidate.terms["decode"] for candidate in candidates)
    rests = []
    for candidate in candidates:
        decode = candidate.terms["decode"]
        rests.append(candidate.cost - (decode if decode <= NEAR * fastest else fastest))
    limit = min(rests) * NEAR
    near = [candidate for candidate, rest in zip(candidates, rests, strict=True) if rest <= limit]
    best = max((-candidate.load, candidate.cached_tokens) for candidate in near)
    return request.drawn([c for c in near if (-c.load, c.cached_tokens) == best])


# Each picks one of at least one candidates; None: it has no preference, and the cheapest is taken.
POLICIES: dict[str, Callable[[RequestView, Sequence[Candidate]], Candidate | None]] = {"cost": cheapest}
if has_wing("router.routing.policies"):
    from router.routing.policies.policies import OTHER_POLICIES

    POLICIES |= OTHER_POLICIES
