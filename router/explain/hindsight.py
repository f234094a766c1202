"""Regret: the extra cost of a placement over the best one, by the cost model with later measurements. Pure.

The terms of a candidate are those of `routing/predictor.py`, in seconds, corrected in two ways:
- Terms that grow with the answer (GROWING) are scaled to the actual length of the answer.
- Measurements of the request's workers replace their predictions: the wait for the prompt's turn, its computation,
  the pull of its KV, the wait for a slot, the decode time. Since candidates share workers, a measurement corrects
  every candidate that would have used the worker for the same purpose. For other workers, the wait and the time
  between tokens come from concurrent requests, if there were any.
All other terms stay predicted: regret says what the model would choose now. It does not measure what would have
happened on another worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from router.routing.policy import Decision
from router.routing.views import Candidate

GROWING = ("decode", "crowding", "interruption")  # terms proportional to the length of the answer


@dataclass(frozen=True, slots=True)
class LegFacts:
    """What a worker measured up to its first output for a request, in seconds."""

    worker: str
    queue: float
    prefill: float
    pull: float


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """Measurements of a request that was answered without failures or moves.

    legs: on the worker that computed the prompt, and on the decode worker if that is another one.
    decode_seconds: from the first token to the last.
    """

    legs: Sequence[LegFacts]
    num_output_tokens: int
    decode_seconds: float

    @property
    def num_gaps(self) -> int:
        """Tokens that were decoded; the first token comes from the prompt."""
        return max(self.num_output_tokens - 1, 0)

    @property
    def decoding_seconds(self) -> float:
        """The time spent decoding, without the waits of a worker that pulled the KV."""
        waited = self.legs[-1].queue + self.legs[-1].pull if len(self.legs) > 1 else 0.0
        return max(self.decode_seconds - waited, 0.0)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What other requests measured of a worker, in seconds; None: not measured."""

    queue: float | None = None  # before a prompt is computed
    gap: float | None = None  # between tokens


def others_facts(others: Iterable[AnswerFacts]) -> dict[str, WorkerFacts]:
    """Collect measurements of workers from other requests; the first measurement of each worker counts."""
    found: dict[str, WorkerFacts] = {}
    for facts in others:
        computed, decoded = facts.legs[0], facts.legs[-1].worker
        known = found.get(computed.worker, WorkerFacts())
        if known.queue is None:
            found[computed.worker] = replace(known, queue=computed.queue)
        known = found.get(decoded, WorkerFacts())
        if known.gap is None and facts.num_gaps:
            found[decoded] = replace(known, gap=facts.decoding_seconds / facts.num_gaps)
    return found


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Chosen and best placement with corrected costs; the same placement twice if nothing is regretted."""

    chosen: Candidate
    best: Candidate

    @property
    def regret_seconds(self) -> float:
        return self.chosen.cost - self.best.cost


def hindsight(decision: Decision, facts: AnswerFacts, elsewhere: Mapping[str, WorkerFacts]) -> Hindsight:
    """Compare the chosen placement with candidates that were not predicted to miss the objectives by more.

    elsewhere: measurements of workers by concurrent requests.
    """
    chosen = corrected(decision.chosen, decision.expected_tokens, facts, elsewhere)
    others = [
        corrected(candidate, decision.expected_tokens, facts, elsewhere)
        for candidate in decision.candidates
        if candidate.violation <= decision.chosen.violation
    ]
    best = min(others, key=lambda candidate: candidate.cost, default=chosen)
    return Hindsight(chosen, best if best.cost < chosen.cost else chosen)


def corrected(
    candidate: Candidate, expected_tokens: float, facts: AnswerFacts, elsewhere: Mapping[str, WorkerFacts]
) -> Candidate:
    """Return the candidate with terms and cost corrected by measurements."""
    terms = dict(candidate.terms)
    for name in GROWING:
        if name in terms and expected_tokens:
            terms[name] *= facts.num_gaps / expected_tokens
    _correct_prompt(terms, candidate, facts, elsewhere.get(candidate.prefill or candidate.decode, WorkerFacts()))
    if candidate.decode == facts.legs[-1].worker:
        terms["decode"] = facts.decoding_seconds
    elif (gap := elsewhere.get(candidate.decode, WorkerFacts()).gap) is not None:
        terms["decode"] = gap * facts.num_gaps
    return replace(candidate, terms=terms, cost=sum(terms.values()))


def _correct_prompt(terms: dict[str, float], candidate: Candidate, facts: AnswerFacts, others: WorkerFacts) -> None:
    """Correct the terms up to the time when the prompt is on the worker that decodes it."""
    first, last, is_split = facts.legs[0], facts.legs[-1], len(facts.legs) > 1
    if (candidate.prefill or candidate.decode) == first.worker:
        terms |= {"queue": first.queue, "compute": first.prefill + first.pull}
        if "adapter" in terms:
            terms["adapter"] = 0.0  # was read in that time
        if candidate.prefill is None and not is_split:
            terms["slot"] = 0.0  # the wait is part of `queue`
    elif others.queue is not None:
        terms["queue"] = others.queue
    if candidate.prefill is None:
        return
    if not facts.num_gaps:
        terms |= {"pull": 0.0, "slot": 0.0}  # no decode worker was needed
    elif is_split and candidate.decode == last.worker:
        terms |= {"pull": last.pull, "slot": last.queue}
