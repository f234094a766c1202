"""Placements under latency objectives and due times of first tokens are pure functions of the router's views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from common.errors import UnavailableError
from common.objectives.chunks import FLAT_CHUNK_TOKENS
from common.step_times import StepCost
from kvstore.types import WorkerId
from router.config import RouterConfig
from router.objectives.adaptive import AdaptiveRoles, FixedRoles, open_objectives
from router.objectives.moves import MAX_MOVES, KeptRequest, choose_moves, tokens_left
from router.objectives.objectives import AHEAD, LATEST, MOST_GAP, ROUNDING, SLOWDOWN, TTFT_MARGIN, Objectives
from router.objectives.placement import place as place_by_objectives
from router.routing.policy import Decision, choose
from router.routing.rates import AnswerLength
from router.routing.views import Candidate, RequestView, WorkerView
from router.workers.model_workers import ModelWorkers

P0, D0, D1 = (WorkerId(name) for name in ("p0", "d0", "d1"))
COST = StepCost(base=0.0043, row=18e-6, prompt=0.0005, prompt_token=22e-6)
OBJECTIVES = Objectives(ttft=1.0, itl=0.025)


def view(worker: WorkerId, rows: int = 0, queued: int = 0, **fields: Any) -> WorkerView:
    """Make a view in which prefill workers have had some prompts lately."""
    known = {"step": COST, "pull_tokens_per_second": 200_000.0, "num_slots": 256}
    known["prompt_tokens_per_second"] = 10_000.0 if worker == P0 else 0.0
    return WorkerView(worker, num_running=rows, num_rows=rows, queued_prefill_tokens=queued, **{**known, **fields})


def place(
    prefill: Sequence[WorkerView], decode: Sequence[WorkerView], num_tokens: int = 1024, **fields: Any
) -> Decision:
    request = RequestView(num_tokens, fields.pop("cached", {}), fields.pop("expected", 128.0), **fields)
    return place_by_objectives(request, prefill, decode, 64, OBJECTIVES)


def test_roles_are_followed_while_they_keep_the_objectives() -> None:
    for rows in (4, 20, 100):
        assert place([view(P0)], [view(D0, rows)]).chosen.kind == "disaggregated"


def test_a_queue_sends_prompts_to_decode_workers_that_keep_their_streams_in_time() -> None:
    decision = place([view(P0, queued=30_000)], [view(D0, rows=50)])
    assert decision.chosen.kind == "local"
    assert decision.chosen.itl_seconds <= OBJECTIVES.itl
    assert decision.chosen.violation == 0
    assert place([view(P0, queued=30_000)], [view(D0, rows=50, queued=60_000)]).chosen.kind == "disaggregated"


def test_the_fuller_the_decode_worker_the_longer_the_queue_that_is_suffered() -> None:
    def longest_queue(rows: int) -> int:
        queues = range(0, 30_000, 500)
        return next(q for q in queues if place([view(P0, queued=q)], [view(D0, rows)]).chosen.kind == "local")

    assert longest_queue(1) < longest_queue(100)


def test_decode_workers_without_seats_leave_streams_where_their_prompts_are() -> None:
    full = view(D0, rows=300)
    assert place([view(P0)], [full]).chosen.kind == "kept"
    assert place([view(P0, rows=300)], [full]).chosen.kind != "kept"  # no emptier
    assert place([view(P0, queued=20_000)], [full]).chosen.kind != "kept"  # prompts come first there
    assert place([view(P0)], [full, view(D1)]).chosen.decode == D1


def test_rows_that_wait_for_a_slot_make_steps_no_longer() -> None:
    """They are queued on prefill workers: a decode worker with as many rows as slots takes some of the prompts."""
    gaps = [
        place([view(P0, queued=200_000)], [view(D0, rows, num_slots=256)]).chosen.itl_seconds for rows in (256, 1500)
    ]
    assert gaps[0] == gaps[1] < 2 * OBJECTIVES.itl


def test_an_idle_prefill_worker_keeps_what_it_computes() -> None:
    idle = view(P0, prompt_tokens_per_second=0.0)
    assert place([idle], [view(D0, rows=20)]).chosen.kind == "kept"
    assert place([idle], [view(D0)]).chosen.kind == "local"  # nobody to disturb, and nothing to pull


def test_prompts_that_keep_coming_make_a_prefill_worker_a_bad_place_to_stay() -> None:
    crowded, waiting = view(D0, rows=300), view(P0, prompt_tokens_per_second=20_000.0)
    [quiet] = [c for c in place([view(P0, prompt_tokens_per_second=0.0)], [crowded]).candidates if c.kind == "kept"]
    [busy] = [c for c in place([waiting], [crowded]).candidates if c.kind == "kept"]
    assert busy.cost > quiet.cost + 0.1
    full = view(P0, prompt_tokens_per_second=40_000.0)  # a stream beside them would make them queue
    assert "kept" not in {c.kind for c in place([full], [crowded]).candidates}


def test_long_contexts_make_a_decode_worker_slow() -> None:
    step = StepCost(base=0.0043, row=3e-6, context=14e-9, prompt=0.0005, prompt_token=22e-6, prompt_context=0.9e-9)
    short, long = (view(D0, rows=30, context_tokens=context, step=step) for context in (30_000, 600_000))
    for candidate in ("disaggregated", "local"):
        times = []
        for worker in (short, long):
            [found] = [c for c in place([view(P0, step=step)], [worker]).candidates if c.kind == candidate]
            times.append(found.terms["decode"])
        assert times[0] < times[1]
    chosen = place([view(P0, step=step)], [long, view(D1, rows=31, context_tokens=31_000, step=step)]).chosen
    assert chosen.decode == D1  # more rows, but less KV to read


def test_short_answers_are_not_handed_over_when_that_gap_would_miss_the_objective() -> None:
    workers = [view(P0, prompt_tokens_per_second=0.0)], [view(D0, rows=20)]
    for expected, kinds in ((64.0, {"local", "kept"}), (400.0, {"disaggregated", "local", "kept"})):
        candidates = place(*workers, num_tokens=6000, expected=expected).candidates
        assert {c.kind for c in candidates if c.itl_seconds <= OBJECTIVES.itl} == kinds


def test_a_short_answer_does_not_wait_long_for_the_sake_of_one_gap() -> None:
    """However long that gap is, a first token that is very late is worse."""
    busy = view(D0, rows=20, prompt_tokens_per_second=20_000.0)
    assert place([view(P0)], [busy], num_tokens=6000, expected=20.0).chosen.kind != "disaggregated"
    flooded = view(D0, rows=20, queued=60_000, prompt_tokens_per_second=20_000.0)
    found = place([view(P0, queued=4_000)], [flooded], num_tokens=6000, expected=20.0).chosen
    assert found.kind == "disaggregated"
    assert found.itl_seconds > 2 * OBJECTIVES.itl


def test_short_or_cached_prompts_are_local() -> None:
    assert place([view(P0, queued=4096)], [view(D0, rows=20)], num_tokens=40).chosen.kind == "local"
    assert place([view(P0)], [view(D0, rows=20)], cached={D0: 1000}).chosen.kind == "local"


def test_when_nothing_keeps_the_objectives_they_are_missed_least() -> None:
    decision = place([view(P0, queued=90_000)], [view(D0, rows=200, queued=200_000)])
    assert decision.chosen.violation > 0
    assert decision.chosen.violation == min(candidate.violation for candidate in decision.candidates)


def test_violations_are_shares_of_the_objectives_and_no_gap_outweighs_every_first_token() -> None:
    assert OBJECTIVES.violation(TTFT_MARGIN, 0.025) == 0.0
    assert Objectives(ttft=1.0).violation(1.5 * TTFT_MARGIN, 9.0) == pytest.approx(0.5)
    assert Objectives(itl=0.02).violation(9.0, 0.021 + 0.02 * ROUNDING) == pytest.approx(0.05)
    assert OBJECTIVES.violation(1.5 * TTFT_MARGIN, 9.0) == pytest.approx(0.5 + MOST_GAP)
    request, workers = RequestView(1024, {}), ([], [view(D0, rows=20)])
    [found], [plain] = (
        place_by_objectives(request, *workers, 64, Objectives(ttft=1.0)).candidates,
        choose("cost", request, *workers, 64).candidates,
    )
    assert found.terms["crowding"] == plain.terms["crowding"] > 0  # without an objective for gaps


def test_equal_workers_share_and_unmeasured_ones_take_the_others_costs() -> None:
    decode = [view(D0, rows=10), view(D1, rows=10)]
    chosen = {place([view(P0)], decode, draw=number / 10).chosen.decode for number in range(10)}
    assert chosen == {D0, D1}
    [first, *_] = place([WorkerView(P0)], [view(D0)]).candidates
    assert first.ttft_seconds == pytest.approx(COST.seconds(0, 1024))
    assert not first.is_measured
    assert place([WorkerView(P0)], [WorkerView(D0, num_rows=20)]).chosen.violation > 0  # defaults are slow


def test_costs_are_the_sums_of_their_terms_and_the_order_does_not_matter() -> None:
    workers = [view(P0, queued=900)], [view(D0, rows=30), view(D1, rows=31)]
    decision = place(*workers)
    for candidate in decision.candidates:
        assert candidate.cost == pytest.approx(sum(candidate.terms.values()))
    assert place(workers[0], workers[1][::-1]).chosen == decision.chosen


def test_only_the_cost_policy_places_by_objectives_and_without_them_roles_are_fixed() -> None:
    def roles(**config: Any) -> FixedRoles:
        settings = RouterConfig(model="dry-run", decode="127.0.0.1:1", **config)
        return open_objectives(settings, ModelWorkers("dry-run", "dry-run", ""))

    assert type(roles()) is FixedRoles
    assert isinstance(roles(itl_objective_ms=25), AdaptiveRoles)
    fixed = roles(itl_objective_ms=25, ttft_objective_ms=1000, policy="round-robin")
    assert isinstance(fixed, FixedRoles)
    assert not isinstance(fixed, AdaptiveRoles)
    request = RequestView(1024, {})
    workers = [view(P0, queued=90_000)], [view(D0)]
    chosen = fixed.decide(request, *workers).chosen
    assert chosen.kind == "disaggregated"
    assert chosen.violation > 0
    assert fixed.due_seconds(chosen, 1024, 0.0, has_started=False) == OBJECTIVES.due_seconds(chosen, 1024, 0.0, False)
    with pytest.raises(UnavailableError):
        place([view(P0)], [])
    unbound = roles(local_prefill_tokens=64).decide(request, *workers).chosen
    assert unbound.kind == "disaggregated"
    assert unbound.ttft_seconds > 1.5
    assert unbound.violation == 0
    assert {c.kind for c in place([], [view(D0)]).candidates} == {"local"}


# -- moves --------------------------------------------------------------------------------------------------------


def test_an_answer_goes_on_for_a_quarter_of_the_mean_when_it_is_longer() -> None:
    answers = AnswerLength()
    assert tokens_left(answers, 1000, 10) == 54
    for _ in range(200):
        answers.observe(20)
    assert [tokens_left(answers, *each) for each in ((1000, 12), (1000, 30), (32, 30))] == [8, 5, 2]


def kept(count: int = 1, tokens_left: float = 100.0, seconds_here: float = 1.0) -> list[KeptRequest]:
    return [KeptRequest(f"c{number}", 1100, tokens_left + number, seconds_here, 200) for number in range(count)]


def test_kept_requests_stay_while_nothing_comes() -> None:
    idle = view(P0, rows=3, prompt_tokens_per_second=0.0)
    assert choose_moves(idle, kept(3), [view(D0, rows=3)], OBJECTIVES) == []
    assert choose_moves(idle, kept(3), [view(D0, rows=200)], OBJECTIVES) == []


def test_they_move_when_prompts_come_those_with_most_left_first() -> None:
    source = view(P0, rows=3, queued=4096, prompt_tokens_per_second=20_000.0)
    moves = choose_moves(source, kept(3), [view(D0, rows=20)], OBJECTIVES)
    assert [move.choice_id for move in moves] == ["c2", "c1", "c0"]
    chosen = moves[0].chosen
    assert (chosen.prefill, chosen.decode) == (P0, D0)
    assert chosen.terms["stay"] > chosen.cost


def test_they_move_when_decode_workers_have_room_again() -> None:
    many = view(P0, rows=200)
    assert choose_moves(many, kept(20), [view(D0, rows=5)], OBJECTIVES)
    assert choose_moves(many, kept(20), [view(D0, rows=250, num_slots=250)], OBJECTIVES) == []


def test_short_answers_do_not_move_when_that_gap_would_miss_the_objective() -> None:
    source, target = view(P0, rows=3, queued=4096, prompt_tokens_per_second=20_000.0), view(D0, rows=100)
    for num_answered, num_moves in ((20, 0), (200, 1)):
        requests = [KeptRequest("c", 1100, tokens_left=60.0, seconds_here=1.0, num_answered=num_answered)]
        assert len(choose_moves(source, requests, [target], OBJECTIVES)) == num_moves


def test_moves_are_bounded_and_what_has_just_come_or_is_about_to_end_stays() -> None:
    source = view(P0, rows=40, queued=8192, prompt_tokens_per_second=20_000.0)
    assert len(choose_moves(source, kept(40), [view(D0)], OBJECTIVES)) == MAX_MOVES
    assert choose_moves(source, kept(1, seconds_here=0.01), [view(D0)], OBJECTIVES) == []
    assert choose_moves(source, kept(1, tokens_left=2), [view(D0)], OBJECTIVES) == []


def test_where_a_row_stays_its_context_is_its_own_and_its_time_the_others() -> None:
    def stay(rows: int, context: int, queued: int = 4096) -> float:
        step = replace(COST, context=14e-9)
        source = view(P0, rows, queued, context_tokens=context, step=step, prompt_tokens_per_second=20_000.0)
        [move] = choose_moves(source, kept(), [view(D0, step=step)], OBJECTIVES)
        assert move.chosen.cost == pytest.approx(sum(move.chosen.terms.values()) - move.chosen.terms["stay"])
        return move.chosen.terms["stay"]

    assert stay(1, 1100) == pytest.approx(stay(1, 0), rel=5e-4)  # the queue beside it is a little longer
    assert stay(1, 1100) < stay(1, 20_000)
    assert stay(2, 2200) < stay(1, 1100)  # that prompts wait for a step with rows is the fault of both
    assert stay(2, 2200) < stay(3, 3300) < stay(20, 22_000)
    assert stay(3, 3300) < stay(3, 3300, queued=8192)


def test_moves_spread_and_keep_the_objective_of_their_target() -> None:
    source = view(P0, rows=8, queued=8192, prompt_tokens_per_second=20_000.0)
    moves = choose_moves(source, kept(8), [view(D0, rows=40), view(D1, rows=40)], OBJECTIVES)
    assert {move.chosen.decode for move in moves} == {D0, D1}
    slow = view(D0, rows=40, step=StepCost(base=0.03, prompt_token=22e-6))
    assert choose_moves(source, kept(8), [slow], OBJECTIVES) == []


def test_a_worker_that_drains_hands_over_everything() -> None:
    full = view(D0, rows=256)
    moves = choose_moves(view(P0, rows=2), kept(2, seconds_here=0.0), [full], OBJECTIVES, must_leave=True)
    assert len(moves) == 2
    assert choose_moves(view(P0, rows=2), kept(2), [], OBJECTIVES, must_leave=True) == []


def candidate(compute: float, queue: float = 0.0) -> Candidate:
    return Candidate(WorkerId("d"), None, 0, 0.0, {"queue": queue, "compute": compute}, 0, is_measured=True)


def due(compute: float, num_new: int = 1000, waited: float = 0.0, has_started: bool = False) -> float:
    return OBJECTIVES.due_seconds(candidate(compute), num_new, waited, has_started)


def test_a_first_token_is_due_in_proportion_to_its_prompt_and_by_the_objective() -> None:
    assert due(0.02) == pytest.approx(SLOWDOWN * 0.02)
    assert due(0.5) == due(5.0) == LATEST
    assert due(0.5, waited=0.4) == pytest.approx(LATEST - 0.4)
    assert 0 < due(0.5, waited=9.0) < 0.01
    assert Objectives(itl=0.025).due_seconds(candidate(0.5), 1000, 0.0, False) == SLOWDOWN * 0.5


def test_streams_go_before_short_prompts_and_these_before_others_for_a_minute() -> None:
    """In any order of arrival: a stream that waits for its KV is not held up by prompts that came long ago."""
    short = due(0.002, FLAT_CHUNK_TOKENS)
    assert 59 + due(0.5, has_started=True) < short < AHEAD + 59 < due(0.003, FLAT_CHUNK_TOKENS + 1)
    assert -inf < due(0.0, has_started=True)


def test_without_objectives_nothing_is_due() -> None:
    assert Objectives().due_seconds(candidate(0.02), 1000, 0.0, has_started=True) == 0.0
