"""Candidates without latency objectives, and what each would cost, predicted from measured rates. Pure.

    first token = (tokens queued + tokens to compute) / prefill rate + tokens to pull / pull rate + wait for a slot
    later token = step time * (1 + share of the batch that is taken) + penalty as KV runs out
    cost        = first token + expected tokens * later token + delay that a local prefill means for others

A worker without measurements gets the mean of the others, or the defaults. One that was slow and then got nothing,
while others did, is taken to be as fast as the fastest: its next request says whether it still is. A decode worker
computes a prompt itself when the part that its cache lacks is short, or when there is no prefill worker. With
objectives, `placement.py` and `predictor.py` do this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from router.routing.views import (
    DEFAULT_PREFILL_TOKENS_PER_SECOND,
    DEFAULT_PULL_TOKENS_PER_SECOND,
    DEFAULT_STEP_SECONDS,
    Candidate,
    RequestView,
    WorkerView,
)


def candidates_for(
    request: RequestView, prefill: Sequence[WorkerView], decode: Sequence[WorkerView], local_prefill_tokens: int
) -> list[Candidate]:
    """Every pair of workers, and every decode worker alone for which that is sensible."""
    rates = _Rates.of([*prefill, *decode])
    candidates = []
    for worker in decode:
        cached = request.cached_on(worker)
        if not prefill or request.num_tokens - cached <= local_prefill_tokens:
            candidates.append(_candidate(request, worker, None, rates))
    if not candidates:
        candidates = [_candidate(request, worker, first, rates) for worker in decode for first in prefill]
    return candidates


@dataclass(frozen=True, slots=True)
class _Rates:
    """Means over the workers that have been measured, and the best of them where some have been forgotten."""

    prefill: float
    pull: float
    step: float
    best_prefill: float = 0.0
    best_step: float = math.inf

    @classmethod
    def of(cls, workers: Sequence[WorkerView]) -> _Rates:
        prefill = [w.prefill_tokens_per_second for w in workers]
        steps = [w.step_seconds for w in workers]
        means = (
            _mean(prefill, DEFAULT_PREFILL_TOKENS_PER_SECOND),
            _mean([w.pull_tokens_per_second for w in workers], DEFAULT_PULL_TOKENS_PER_SECOND),
            _mean(steps, DEFAULT_STEP_SECONDS),
        )
        if all(w.is_forgotten for w in workers):  # nothing to do for anybody
            return cls(*means)
        return cls(*means, max(prefill), min((step for step in steps if step), default=math.inf))

    def prefill_of(self, worker: WorkerView) -> float:
        """Prompt tokens a second."""
        own = worker.prefill_tokens_per_second or self.prefill
        return max(own, self.best_prefill) if worker.is_forgotten else own

    def step_of(self, worker: WorkerView) -> float:
        """Seconds of a step that decodes."""
        own = worker.step_seconds or self.step
        return min(own, self.best_step) if worker.is_forgotten else own


def _mean(values: Sequence[float], default: float) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else default


def _decode_terms(request: RequestView, worker: WorkerView, rates: _Rates) -> dict[str, float]:
    step = rates.step_of(worker)
    taken = min(worker.load / max(worker.max_num_seqs, 1), 1.0)
    return {
        "slot": worker.slot_seconds(request.expected_tokens, step),
        "decode": request.expected_tokens * step * (1 + taken + worker.kv_pressure),
    }


def _candidate(request: RequestView, worker: WorkerView, prefill: WorkerView | None, rates: _Rates) -> Candidate:
    """Decode on `worker`, after `prefill` has computed the prompt, or computing it there as well."""
    computing = prefill or worker
    cached = request.cached_on(computing)
    rate = rates.prefill_of(computing)
    compute = (request.num_tokens - cached) / rate
    terms = {"queue": computing.queued_prefill_tokens / rate, "compute": compute}
    if prefill is None:
        terms["disturbance"] = compute * min(worker.num_running, 8)
    else:
        terms["pull"] = (request.num_tokens - request.cached_on(worker)) / (
            worker.pull_tokens_per_second or rates.pull
        )
    terms |= _decode_terms(request, worker, rates)
    is_measured = bool(computing.prefill_tokens_per_second and worker.step_seconds)
    return Candidate.between(worker, prefill, terms, cached, is_measured)
