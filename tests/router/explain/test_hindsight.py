"""Regret is the cost by the same cost model once the facts are known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.step_times import StepCost
from kvstore.types import WorkerId
from router.explain.hindsight import AnswerFacts, LegFacts, WorkerFacts, corrected, hindsight, others_facts
from router.routing.policy import Decision, choose
from router.routing.views import Candidate, RequestView, WorkerView

P0, P1, D0, D1 = (WorkerId(name) for name in ("p0", "p1", "d0", "d1"))
TOKENS = 101  # of an answer as long as expected: 100 gaps


def view(worker: WorkerId, step: float = 0.01, prompt_token: float = 0.001, **fields: Any) -> WorkerView:
    return WorkerView(worker, step=StepCost(base=step, prompt_token=prompt_token), **fields)


def decided(prefill: list[WorkerView], decode: list[WorkerView], **fields: Any) -> Decision:
    return choose("cost", RequestView(1000, {}, expected_tokens=100, **fields), prefill, decode, 64)


def facts(chosen: Candidate, num_output_tokens: int = TOKENS, **others: float) -> AnswerFacts:
    """Make facts that equal the predictions for the chosen placement, except for `others`."""
    terms = {**chosen.terms, **others}
    waits = terms["pull"] + terms["slot"] if chosen.prefill else 0.0
    first = LegFacts(chosen.prefill or chosen.decode, terms["queue"], terms["compute"], 0.0)
    legs = [first, LegFacts(chosen.decode, terms["slot"], 0.0, terms["pull"])] if chosen.prefill else [first]
    return AnswerFacts(legs, num_output_tokens, terms["decode"] * (num_output_tokens - 1) / 100 + waits)


@given(st.integers(0, 4000), st.integers(0, 4000), st.floats(0.005, 0.05), st.floats(0, 1))
def test_what_came_as_predicted_is_not_regretted(queued0: int, queued1: int, step: float, draw: float) -> None:
    prefill = [view(P0, queued_prefill_tokens=queued0), view(P1, queued_prefill_tokens=queued1)]
    for workers in (prefill, []):
        decision = decided(workers, [view(D0, step), view(D1, num_rows=3)], draw=min(draw, 0.999))
        cheapest = min(candidate.cost for candidate in decision.candidates)
        found = hindsight(decision, facts(decision.chosen), {})
        assert found.chosen.cost == pytest.approx(decision.chosen.cost)
        assert found.regret_seconds == pytest.approx(decision.chosen.cost - cheapest, abs=1e-9)


def test_a_queue_that_was_longer_than_known_is_regretted_and_so_is_every_pair_with_it() -> None:
    decision = decided([view(P0), view(P1, queued_prefill_tokens=500)], [view(D0), view(D1)])
    assert decision.chosen.prefill == P0
    found = hindsight(decision, facts(decision.chosen, queue=2.0), {})
    assert found.best.prefill == P1
    assert found.regret_seconds == pytest.approx(2.0 - found.best.terms["queue"])
    with_p0 = [c for c in decision.candidates if c.prefill == P0]
    known = facts(decision.chosen, queue=2.0)
    assert [corrected(c, 100, known, {}).terms["queue"] for c in with_p0] == [2.0, 2.0]


def candidate(on: WorkerId, prefill: WorkerId | None = None, /, violation: float = 0.0, **terms: float) -> Candidate:
    every = {"queue": 0.0, "compute": 0.0, "slot": 0.0, "decode": 0.0, "crowding": 0.0, **terms}
    if prefill:
        every.setdefault("pull", 0.0)
    cost = sum(every.values())
    return Candidate(on, prefill, 0, cost, every, load=0, is_measured=True, violation=violation)


def decision_of(chosen: Candidate, *others: Candidate) -> Decision:
    return Decision(chosen, (chosen, *others), "cost", 100)


def test_a_short_answer_would_have_been_cheaper_where_its_prompt_was_and_a_long_one_where_it_decodes_fast() -> None:
    fast = candidate(D0, compute=2.0, decode=1.0)  # a busy prompt, 10 ms a token
    slow = candidate(D1, compute=0.5, decode=2.0)
    assert hindsight(decision_of(fast, slow), facts(fast, 11), {}).best.decode == D1
    assert hindsight(decision_of(fast, slow), facts(fast, 301), {}).regret_seconds == 0.0
    assert hindsight(decision_of(slow, fast), facts(slow, 301), {}).regret_seconds == pytest.approx(6.5 - 5.0)


def test_the_length_changes_what_others_lose_for_each_token_and_nothing_else() -> None:
    kept = candidate(P0, crowding=1.0, interruption=0.5, disturbance=0.25, slot=0.125)
    known = AnswerFacts([LegFacts("another", 0.0, 0.0, 0.0)], 201, 0.0)
    assert corrected(kept, 100, known, {}).terms == {**kept.terms, "crowding": 2.0, "interruption": 1.0}


def test_an_answer_of_one_token_needed_no_decode_worker() -> None:
    split = candidate(D0, P0, compute=1.0, pull=0.5, slot=0.25, decode=1.0, crowding=0.5)
    found = hindsight(decision_of(split), AnswerFacts([LegFacts(P0, 0.0, 1.0, 0.0)], 1, 0.0), {})
    assert found.chosen.cost == 1.0


def test_waits_between_first_and_second_token_count_once() -> None:
    split = candidate(D0, P0, compute=1.0, pull=0.1, slot=0.0, decode=1.0)
    legs = [LegFacts(P0, 0.0, 1.0, 0.0), LegFacts(D0, 0.3, 0.02, 0.2)]
    known = hindsight(decision_of(split), AnswerFacts(legs, TOKENS, 1.5), {}).chosen
    assert known.terms == {**split.terms, "pull": 0.2, "slot": 0.3, "decode": pytest.approx(1.0)}
    assert known.cost == pytest.approx(1.0 + 1.5)


def test_a_cheaper_placement_that_would_have_missed_the_objectives_is_no_better_one() -> None:
    chosen = candidate(D0, decode=2.0, violation=0.1)
    late = candidate(D1, decode=0.1, violation=0.5)
    as_late = candidate(D1, decode=1.5, violation=0.1)
    assert hindsight(decision_of(chosen, late), facts(chosen), {}).regret_seconds == 0.0
    assert hindsight(decision_of(chosen, late, as_late), facts(chosen), {}).best.terms["decode"] == 1.5


def test_a_slow_time_for_all_workers_is_not_regretted() -> None:
    """Other requests served at the same time show how those workers did, as far as they measured it."""
    decision = decision_of(candidate(D0, decode=1.0), candidate(D1, decode=1.1))
    mine = facts(decision.chosen, decode=3.0)
    assert hindsight(decision, mine, {}).regret_seconds == pytest.approx(3.0 - 1.1)
    beside = [
        AnswerFacts([LegFacts(D1, 0.2, 0.1, 0.0)], 1, 0.0),  # nothing was decoded
        AnswerFacts([LegFacts(P0, 0.4, 0.1, 0.0), LegFacts(D1, 0.25, 0.0, 0.25)], 65, 2.5),
        AnswerFacts([LegFacts(P0, 9.0, 0.1, 0.0), LegFacts(D1, 0.0, 0.0, 0.0)], 51, 50.0),  # farther away
    ]
    known = others_facts(beside)
    assert known == {D1: WorkerFacts(0.2, 2.0 / 64), P0: WorkerFacts(0.4, None)}
    found = hindsight(decision, mine, known)
    assert found.regret_seconds == 0.0
    [_, other] = [corrected(each, 100, mine, known) for each in decision.candidates]
    assert (other.terms["queue"], other.terms["decode"]) == (0.2, 100 * 2.0 / 64)
