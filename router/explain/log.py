"""A bounded log of recent requests' routing decisions and time lines, which GET /explain/{id} returns.

Holds no text, and no tokens once a choice has ended. A time line's spans are consecutive, so they sum to the total.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from router.dispatch import RequestLog
from router.explain.hindsight import AnswerFacts, LegFacts, hindsight, others_facts
from router.journal import Event, Journal
from router.routing.policy import Decision
from router.routing.views import Candidate
from router.workers.worker_link import Leg

MAX_ENTRIES = 1_024
MAX_CANDIDATES_SHOWN = 16


@dataclass(slots=True)
class _Choice:
    """Record of one choice: its journal while it is open, and its counts afterwards."""

    journal: Journal | None
    decisions: list[Decision] = field(default_factory=list)
    first_deltas: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    began: float = 0.0
    ended: float = 0.0
    decode_seconds: float = 0.0  # from the first token to the last


class ExplainLog(RequestLog):
    """The most recent requests; older ones are dropped."""

    def __init__(self) -> None:
        self._choices: OrderedDict[str, _Choice] = OrderedDict()

    def __len__(self) -> int:
        return len(self._choices)

    def decided(self, journal: Journal, decision: Decision) -> None:
        choice = self._choices.get(journal.choice_id)
        if choice is None:
            choice = self._choices[journal.choice_id] = _Choice(journal, began=journal.arrival)
            if len(self._choices) > MAX_ENTRIES:
                self._choices.popitem(last=False)
        choice.decisions.append(decision)

    def first_delta(self, journal: Journal, leg: Leg, expected_cached_tokens: int | None) -> None:
        """Record what a leg's worker measured. expected_cached_tokens: None if the prompt was computed before."""
        choice, times = self._choices.get(journal.choice_id), leg.times
        if choice is None or times is None:
            return
        choice.first_deltas.append(
            {
                "phase": leg.link.role,
                "worker": leg.link.worker_id,
                "queue_seconds": round(times.queue_seconds, 6),
                "prefill_seconds": round(times.prefill_seconds, 6),
                "kv_pull_seconds": round(times.kv_pull_seconds, 6),
                "transport": times.transport or None,
                "kv_pull_failed": times.kv_pull_failed,
                "expected_cached_tokens": expected_cached_tokens,
                "cached_tokens": times.num_cached_tokens,
                "pulled_tokens": times.num_pulled_tokens,
                "prefetched_tokens": times.num_prefetched_tokens,
                "offered_tokens": leg.num_offered_tokens,
            }
        )

    def ended(self, journal: Journal, now: float) -> None:
        choice = self._choices.get(journal.choice_id)
        if choice is not None:
            choice.counts = _counts(journal, journal.outcome, now)
            choice.ended = now
            choice.decode_seconds = journal.last_token_time - journal.first_token_time
            choice.journal = None

    def recent(self, count: int, now: float) -> list[dict[str, Any]]:
        """Return the most recent choices, newest first: counts, time line and measurements of workers."""
        return [
            {
                "choice": key,
                **(_counts(choice.journal, "open", now) if choice.journal else choice.counts),
                "workers": choice.first_deltas,
            }
            for key, choice in islice(reversed(self._choices.items()), count)
        ]

    def find(self, request_id: str, now: float) -> list[dict[str, Any]]:
        """Return all choices of a request by its public id; empty if it is unknown or was dropped."""
        return [
            _shown(key, choice, self._hindsight(choice), now)
            for key, choice in self._choices.items()
            if key == request_id or key.rpartition("-")[0] == request_id
        ]

    def _hindsight(self, choice: _Choice) -> dict[str, Any] | None:
        """Compute the regret of a placement from measurements of this and of concurrent requests."""
        facts = _facts(choice)
        if facts is None or not choice.decisions:
            return None
        concurrent = [
            other
            for other in self._choices.values()
            if other is not choice and other.began < choice.ended and choice.began < other.ended
        ]
        concurrent.sort(key=lambda other: abs(other.began - choice.began))
        elsewhere = others_facts(filter(None, map(_facts, concurrent)))
        found = hindsight(choice.decisions[0], facts, elsewhere)
        return {
            "regret_ms": round(1e3 * found.regret_seconds, 3),
            "chosen": _candidate(found.chosen),
            "best": _candidate(found.best),
            "measured_workers": sorted({leg.worker for leg in facts.legs} | elsewhere.keys()),
        }


def _counts(journal: Journal, state: str, end: float) -> dict[str, Any]:
    return {
        "state": state,
        "prompt_tokens": len(journal.prompt_token_ids),
        "output_tokens": len(journal.output_token_ids),
        "cached_tokens": journal.num_cached_tokens,
        "draft_tokens": journal.num_draft_tokens,
        "accepted_draft_tokens": journal.num_accepted_tokens,
        "migrations": journal.num_migrations,
        "moves": journal.num_moves,
        "time_line": _time_line(journal, end),
        "total_seconds": round(end - journal.arrival, 6),
    }


def _shown(name: str, choice: _Choice, known: dict[str, Any] | None, now: float) -> dict[str, Any]:
    return {
        "choice": name,
        **(_counts(choice.journal, "open", now) if choice.journal else choice.counts),
        "decisions": [
            {
                "policy": decision.policy,
                "chosen": _candidate(decision.chosen),
                "candidates": [_candidate(item) for item in decision.candidates[:MAX_CANDIDATES_SHOWN]],
            }
            for decision in choice.decisions
        ],
        "hindsight": known,
        "workers": choice.first_deltas,
    }


def _facts(choice: _Choice) -> AnswerFacts | None:
    """Return the measurements of an answer; None before its end, and if it left its first placement."""
    counts = choice.counts
    if counts.get("state") not in ("stop", "length") or counts["migrations"] or counts["moves"]:
        return None
    legs = [
        LegFacts(leg["worker"], leg["queue_seconds"], leg["prefill_seconds"], leg["kv_pull_seconds"])
        for leg in choice.first_deltas
    ]
    return AnswerFacts(legs, counts["output_tokens"], choice.decode_seconds) if legs else None


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "placement": candidate.kind,
        "decode": candidate.decode,
        "prefill": candidate.prefill,
        "cost_seconds": round(candidate.cost, 6),
        "terms_seconds": {name: round(value, 6) for name, value in candidate.terms.items()},
        "expected_cached_tokens": candidate.cached_tokens,
        "load": candidate.load,
        "ttft_seconds": round(candidate.ttft_seconds, 6),
        "itl_seconds": round(candidate.itl_seconds, 6),
        "violation": round(candidate.violation, 6),
    }


def _time_line(journal: Journal, end: float) -> list[dict[str, Any]]:
    """Return consecutive spans from arrival to end. Each event ends one span."""
    names = ["accepted", *map(_told, journal.events)]
    times = [journal.arrival, *(event.time for event in journal.events), end]
    return [
        {"after": name, "seconds": round(stop - start, 6)}
        for name, (start, stop) in zip(names, pairwise(times), strict=True)
    ]


def _told(event: Event) -> str:
    return f"{event.what}{' on ' * bool(event.worker)}{event.worker}{': ' * bool(event.reason)}{event.reason}"
