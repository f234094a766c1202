"""Which workers shall serve a request. Pure: everything it knows comes as arguments, randomness included.

The cost policy predicts for each candidate

    first token = (tokens queued + tokens to compute) / prefill rate + tokens to pull / pull rate + wait for a slot
    later token = step time * (1 + share of the batch that is taken) + penalty as KV runs out
    cost        = first token + expected tokens * later token + delay that a local prefill means for others

and takes the least loaded of those that are about the cheapest. Rates are measured online per worker; a worker
without measurements gets the mean of the others, or the defaults below. A decode worker computes a prompt itself when
the part that its cache lacks is short, or when there is no prefill worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import UnavailableError
from kvstore.types import WorkerId

EXPECTED_TOKENS = 64  # of an answer, before any was measured
DEFAULT_PREFILL_TOKENS_PER_SECOND = 2_000.0
DEFAULT_PULL_TOKENS_PER_SECOND = 100_000.0
DEFAULT_STEP_SECONDS = 0.02
KV_PRESSURE_START = 0.9  # share of KV blocks in use from which on a worker costs more
NEAR = 1.1  # costs within 10% are equal: measured step times of equal workers differ by that much


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What the policy may know of one worker. Rates of 0 are not measured yet."""

    worker_id: WorkerId
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    prefill_tokens_per_second: float = 0.0
    pull_tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    token_seconds: float = 0.0  # what a step takes, seen from an answer
    kv_used_share: float = 0.0
    max_num_seqs: int = 64
    num_slots: int = 64  # requests that it can run at once: fewer than max_num_seqs when KV blocks are the limit

    @property
    def load(self) -> int:
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True)
class RequestView:
    """What the policy may know of one request. `draw` is uniform in [0, 1); `turn` counts decisions."""

    num_tokens: int
    cached_tokens: Mapping[WorkerId, int]  # by the prefix index
    expected_tokens: float = EXPECTED_TOKENS  # of its answer
    session: str = ""
    draw: float = 0.0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve a request. `prefill` None: the decode worker computes the prompt."""

    decode: WorkerId
    prefill: WorkerId | None
    cost: float
    terms: Mapping[str, float]  # seconds
    cached_tokens: int
    load: int
    is_measured: bool  # whether the terms come from measured rates

    @property
    def wait_seconds(self) -> float:
        """Predicted time until decoding begins."""
        return sum(self.terms.get(name, 0.0) for name in ("queue", "compute", "pull", "slot"))

    @property
    def service_seconds(self) -> float:
        """Predicted time from then to the end."""
        return self.terms["decode"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen, and among what."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    policy: str


class Policy(Protocol):
    """Picks one of at least one candidates."""

    name: str

    def pick(self, request: RequestView, candidates: Sequence[Candidate]) -> Candidate: ...


def choose(
    policy: Policy,
    request: RequestView,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    local_prefill_tokens: int,
) -> Decision:
    """The decision for one request. Raises UnavailableError without a decode worker."""
    if not decode:
        raise UnavailableError("no decode worker is available")
    candidates = enumerate_candidates(request, prefill, decode, local_prefill_tokens)
    return Decision(policy.pick(request, candidates), tuple(candidates), policy.name)


def enumerate_candidates(
    request: RequestView, prefill: Sequence[WorkerView], decode: Sequence[WorkerView], local_prefill_tokens: int
) -> list[Candidate]:
    """Every pair of workers, and every decode worker alone for which that is sensible."""
    rates = _Rates.of([*prefill, *decode])
    candidates = []
    for worker in decode:
        cached = _cached(request, worker)
        if not prefill or request.num_tokens - cached <= local_prefill_tokens:
            candidates.append(_local(request, worker, rates))
    if not candidates:
        candidates = [_pair(request, first, second, rates) for second in decode for first in prefill]
    return candidates


@dataclass(frozen=True, slots=True)
class _Rates:
    """Means over the workers that have been measured."""

    prefill: float
    pull: float
    step: float

    @classmethod
    def of(cls, workers: Sequence[WorkerView]) -> _Rates:
        return cls(
            _mean([w.prefill_tokens_per_second for w in workers], DEFAULT_PREFILL_TOKENS_PER_SECOND),
            _mean([w.pull_tokens_per_second for w in workers], DEFAULT_PULL_TOKENS_PER_SECOND),
            _mean([w.step_seconds for w in workers], DEFAULT_STEP_SECONDS),
        )


def _mean(values: Sequence[float], default: float) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else default


def _cached(request: RequestView, worker: WorkerView) -> int:
    # The last token is always computed: sampling needs its logits.
    return min(request.cached_tokens.get(worker.worker_id, 0), request.num_tokens - 1)


def _decode_terms(request: RequestView, worker: WorkerView, rates: _Rates) -> dict[str, float]:
    step = worker.step_seconds or rates.step
    taken = min(worker.load / max(worker.max_num_seqs, 1), 1.0)
    pressure = max(0.0, worker.kv_used_share - KV_PRESSURE_START) / (1 - KV_PRESSURE_START)
    slots = max(worker.num_slots, 1)
    ahead = max(0, worker.load + 1 - slots)  # each of them ends before this one starts, `slots` at a time
    return {
        "slot": ahead * request.expected_tokens * max(worker.token_seconds, step) / slots,
        "decode": request.expected_tokens * step * (1 + taken + pressure),
    }


def _local(request: RequestView, worker: WorkerView, rates: _Rates) -> Candidate:
    cached = _cached(request, worker)
    rate = worker.prefill_tokens_per_second or rates.prefill
    compute = (request.num_tokens - cached) / rate
    terms = {
        "queue": worker.queued_prefill_tokens / rate,
        "compute": compute,
        "disturbance": compute * min(worker.num_running, 8),
        **_decode_terms(request, worker, rates),
    }
    is_measured = bool(worker.prefill_tokens_per_second and worker.step_seconds)
    return Candidate(worker.worker_id, None, sum(terms.values()), terms, cached, worker.load, is_measured)


def _pair(request: RequestView, first: WorkerView, second: WorkerView, rates: _Rates) -> Candidate:
    cached = _cached(request, first)
    rate = first.prefill_tokens_per_second or rates.prefill
    pull_rate = second.pull_tokens_per_second or rates.pull
    terms = {
        "queue": first.queued_prefill_tokens / rate,
        "compute": (request.num_tokens - cached) / rate,
        "pull": (request.num_tokens - _cached(request, second)) / pull_rate,
        **_decode_terms(request, second, rates),
    }
    load = first.load + second.load
    is_measured = bool(first.prefill_tokens_per_second and second.step_seconds)
    return Candidate(second.worker_id, first.worker_id, sum(terms.values()), terms, cached, load, is_measured)


class CostPolicy:
    """The cheapest candidate; among equals the least loaded, the one with most in its cache, then by draw."""

    name = "cost"

    def pick(self, request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
        limit = min(candidate.cost for candidate in candidates) * NEAR
        near = [candidate for candidate in candidates if candidate.cost <= limit]
        best = max((-candidate.load, candidate.cached_tokens) for candidate in near)
        return _drawn([c for c in near if (-c.load, c.cached_tokens) == best], request.draw)


class RoundRobinPolicy:
    name = "round-robin"

    def pick(self, request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
        return candidates[request.turn % len(candidates)]


class RandomPolicy:
    name = "random"

    def pick(self, request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
        return _drawn(candidates, request.draw)


class PowerOfTwoPolicy:
    """Two at random, the less loaded one of them."""

    name = "power-of-two"

    def pick(self, request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
        count = len(candidates)
        pair_index = int(request.draw * count * count)
        first, second = candidates[pair_index // count], candidates[pair_index % count]
        return first if first.load <= second.load else second


class SessionStickyPolicy:
    """The same workers for the same session, by rendezvous hashing; without a session, the cheapest."""

    name = "session-sticky"

    def pick(self, request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
        if not request.session:
            return CostPolicy().pick(request, candidates)

        def rank(candidate: Candidate) -> bytes:
            name = f"{request.session}\0{candidate.prefill or ''}\0{candidate.decode}"
            return hashlib.sha256(name.encode()).digest()

        return max(candidates, key=rank)


def _drawn(candidates: Sequence[Candidate], draw: float) -> Candidate:
    return candidates[min(int(draw * len(candidates)), len(candidates) - 1)]


_POLICIES: tuple[type[Policy], ...] = (
    CostPolicy, RoundRobinPolicy, RandomPolicy, PowerOfTwoPolicy, SessionStickyPolicy,
)  # fmt: skip


def policy_by_name(name: str) -> Policy:
    """`name` is one of router.config.POLICIES."""
    return next(kind() for kind in _POLICIES if kind.name == name)
