"""Regret: what a placement cost more than the best one, by the cost model with what is known afterwards. Pure.

The terms of a candidate are those of `routing/predictor.py`, in seconds, corrected in two ways:

- What grows with the answer (GROWING) is scaled to the length that the answer had.
- What the request's workers measured replaces what was predicted of them: the wait for the prompt's turn, its
  computation, the pull of its KV, the wait for a seat, the time of decoding. Candidates share workers, so that a
  measurement corrects each one that would have used the worker for the same. Of other workers, the wait and the time
  between tokens come from requests that were there at the same time, if there were any.

All else stays predicted: a regret says what the model would choose now, and is no measurement of what would have
happened there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from router.routing.policy import Decision
from router.routing.views import Candidate

GROWING = ("decode", "crowding", "interruption")  # terms in proportion to the length of the answer


@dataclass(frozen=True, slots=True)
class LegFacts:
    """What a worker measured up to its first output of a request, in seconds."""

    worker: str
    queue: float
    prefill: float
    pull: float


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What is known of a request that was answered without a failure or a move on its way.

    legs: of the worker that computed the prompt, and of the one that decoded, if that is another one.
    decode_seconds: from the first token to the last.
    """

    legs: Sequence[LegFacts]
    num_output_tokens: int
    decode_seconds: float

    @property
    def num_gaps(self) -> int:
        """Tokens that were decoded: the first one is the prompt's."""
        return max(self.num_output_tokens - 1, 0)

    @property
    def decoding_seconds(self) -> float:
        """The time of decoding alone, without the waits of the worker that pulled the KV."""
        waited = self.legs[-1].queue + self.legs[-1].pull if len(self.legs) > 1 else 0.0
        return max(self.decode_seconds - waited, 0.0)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What others measured of a worker, in seconds; None: nobody did."""

    queue: float | None = None  # of a prompt
    gap: float | None = None  # between tokens


def others_facts(others: Iterable[AnswerFacts]) -> dict[str, WorkerFacts]:
    """What is known of workers by other requests; of each worker, what comes first counts."""
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
    """Two placements with the costs that are known afterwards; the same one twice where nothing is regretted."""

    chosen: Candidate
    best: Candidate

    @property
    def regret_seconds(self) -> float:
        return self.chosen.cost - self.best.cost


def hindsight(decision: Decision, facts: AnswerFacts, elsewhere: Mapping[str, WorkerFacts]) -> Hindsight:
    """Compare the chosen placement with those that were not predicted to miss the objectives by more.

    elsewhere: of workers, by requests that were there at the same time.
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
    """The candidate with the cost and the terms that are known afterwards."""
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
    """Correct what is waited for until the prompt is where it is decoded."""
    first, last, is_split = facts.legs[0], facts.legs[-1], len(facts.legs) > 1
    if (candidate.prefill or candidate.decode) == first.worker:
        terms |= {"queue": first.queue, "compute": first.prefill + first.pull}
        if "adapter" in terms:
            terms["adapter"] = 0.0  # was read meanwhile
        if candidate.prefill is None and not is_split:
            terms["slot"] = 0.0  # was waited for in the queue
    elif others.queue is not None:
        terms["queue"] = others.queue
    if candidate.prefill is None:
        return
    if not facts.num_gaps:
        terms |= {"pull": 0.0, "slot": 0.0}  # no decode worker was needed
    elif is_split and candidate.decode == last.worker:
        terms |= {"pull": last.pull, "slot": last.queue}
