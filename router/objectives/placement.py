"""Placements of a request under latency objectives: which workers compute and decode it. Pure.

A worker's role is a preference. A request may be
    disaggregated  a prefill worker computes the prompt, a decode worker the rest
    local          a decode worker does both, the prompt in chunks that keep the ITL objective of its streams
    kept           a prefill worker does both; a move to a decode worker may follow
`predictor.py` predicts time to first token, time between tokens and cost of each. The cheapest placement that meets
both objectives is chosen, otherwise the one that misses them least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.errors import UnavailableError
from router.objectives.objectives import Objectives
from router.objectives.predictor import ObjectivePredictor
from router.routing.policy import Decision, cheapest
from router.routing.views import Candidate, RequestView, WorkerView

SAME_VIOLATION = 0.05  # smaller differences are noise
MOST_BESIDE = 0.65  # most time that prompts may take of a prefill worker that decodes too; with more its queue grows
SHORT_QUEUE = 0.05  # seconds of queued prompts up to which a prefill worker counts as idle


def place(
    request: RequestView,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    local_prefill_tokens: int,
    objectives: Objectives,
) -> Decision:
    """Decide the placement of one request, as `policy.choose`. Raises UnavailableError without a decode worker."""
    if not decode:
        raise UnavailableError("no decode worker is available")
    candidates = placements_for(request, prefill, decode, local_prefill_tokens, objectives)
    chosen = cheapest(request, admissible(candidates))
    return Decision(chosen, tuple(candidates), "cost", request.expected_tokens)


def placements_for(
    request: RequestView,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    local_prefill_tokens: int,
    objectives: Objectives,
) -> list[Candidate]:
    """Return all placements. A prefill worker with a queue, or more streams than decode workers, keeps nothing."""
    decode = [_in_slots(worker) for worker in decode]
    predict = ObjectivePredictor(objectives, request, [*prefill, *decode], local_prefill_tokens)
    candidates = predict.disaggregated(prefill, decode)
    candidates += [predict.on_one_worker(worker) for worker in decode]
    fewest = min(worker.num_rows for worker in decode)
    for worker in prefill:
        is_idle = predict.queue_seconds(worker) < SHORT_QUEUE and predict.share_beside_rows(worker) < MOST_BESIDE
        if worker.num_rows < fewest and is_idle:
            candidates.append(predict.kept(worker))
    return candidates


def _in_slots(worker: WorkerView) -> WorkerView:
    """Return the worker without the rows that wait for a slot, since they do not make steps longer."""
    if worker.num_rows <= worker.num_slots:
        return worker
    context_tokens = worker.context_tokens * worker.num_slots // worker.num_rows
    return replace(worker, num_rows=worker.num_slots, context_tokens=context_tokens)


def admissible(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Select placements that meet the objectives, or miss them least, and among these the cheapest kind."""
    least = min(candidate.violation for candidate in candidates)
    limit = 0.0 if least == 0 else least + SAME_VIOLATION
    kept = [candidate for candidate in candidates if candidate.violation <= limit]
    kind = min(kept, key=lambda candidate: candidate.cost).kind
    return [candidate for candidate in kept if candidate.kind == kind]
