"""Routing policy: which workers serve a request. Pure: all inputs, even randomness, are arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import UnavailableError
from common.wings import has_wing
from router.routing.predictor import Predictor
from router.routing.views import Candidate, RequestView, WorkerView

NEAR = 1.1  # decode times within 10% count as equal, and other costs too: equal workers' measurements differ so much


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen candidate and all that were considered, for an answer of the expected length."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    policy: str
    expected_tokens: float = 0.0


def choose(
    policy: str,
    request: RequestView,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    local_prefill_tokens: int,
    predictor: Callable[[RequestView, Sequence[WorkerView], int], Predictor] = Predictor,
) -> Decision:
    """Choose for one request. `policy` is one of POLICIES. Raises UnavailableError without a decode worker.

    A decode worker computes the prompt itself if its cache lacks only a short part, or if there is no prefill worker.
    Otherwise every pair of workers is a candidate.
    """
    if not decode:
        raise UnavailableError("no decode worker is available")
    predict = predictor(request, [*prefill, *decode], local_prefill_tokens)
    alone = [w for w in decode if not prefill or request.num_tokens - request.cached_on(w) <= local_prefill_tokens]
    candidates = [predict.on_one_worker(worker) for worker in alone] or predict.disaggregated(prefill, decode)
    chosen = POLICIES[policy](request, candidates) or cheapest(request, candidates)
    return Decision(chosen, tuple(candidates), policy, request.expected_tokens)


def cheapest(request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate of lowest cost. Ties: least loaded, then longest cached prefix, then random.

    Decode times, most of the cost, are compared separately: their errors would hide what a cached prefix saves.
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


# Each picks one of the candidates, at least one; None: no preference, and the cheapest is taken.
POLICIES: dict[str, Callable[[RequestView, Sequence[Candidate]], Candidate | None]] = {"cost": cheapest}
if has_wing("router.routing.policies"):
    from router.routing.policies.policies import OTHER_POLICIES

    POLICIES |= OTHER_POLICIES
