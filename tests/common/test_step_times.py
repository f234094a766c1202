"""Step costs are learned from measured steps."""

from __future__ import annotations

import random

import pytest

from common.pairs import num_pairs
from common.step_times import MIN_PROMPT_TOKENS, WIDEST, StepCost, StepTimes

TRUE = StepCost(base=0.004, row=20e-6, prompt=0.001, prompt_token=20e-6)


def measured(times: StepTimes, rows: int, tokens: int, factor: float = 1.0) -> None:
    times.observe(rows, tokens, factor * TRUE.seconds(rows, tokens))


def test_a_line_is_found_for_either_part() -> None:
    times, rng = StepTimes(), random.Random(1)
    for _ in range(400):
        rows = rng.randrange(1, 200)
        measured(times, rows, 0, rng.uniform(0.95, 1.05))
        measured(times, rows, rng.randrange(64, 800), rng.uniform(0.95, 1.05))
    for rows, tokens in ((10, 0), (150, 0), (10, 100), (100, 600)):
        assert times.cost.seconds(rows, tokens) == pytest.approx(TRUE.seconds(rows, tokens), rel=0.1)


def test_equal_steps_tell_their_own_time_and_no_part_is_negative() -> None:
    times = StepTimes()
    for _ in range(50):
        measured(times, 8, 0)
    assert times.cost.seconds(8) == pytest.approx(TRUE.seconds(8))
    assert times.cost.row == 0
    for _ in range(50):
        times.observe(0, 1024, 0.02)
    assert times.cost.seconds(0, 1024) == pytest.approx(0.02)
    assert times.cost.prompt == 0  # through the origin until sizes differ
    for _ in range(50):  # larger steps that take less: no negative slope
        times.observe(0, 4096, 0.01)
        times.observe(8, 0, TRUE.seconds(8))
        times.observe(64, 0, 0.001)
    assert min(times.cost.base, times.cost.row, times.cost.prompt, times.cost.prompt_token) >= 0


def test_nothing_is_learned_from_nothing_and_little_from_an_accident() -> None:
    times = StepTimes()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        times.observe(4, 0, seconds)
    times.observe(0, 0, 1.0)
    assert times.cost == StepCost()
    for _ in range(100):
        measured(times, 8, 0)
    times.observe(8, 0, 30.0)  # a pause of the machine
    assert times.cost.seconds(8) < 1.2 * TRUE.seconds(8)


def test_it_follows_a_worker_that_has_become_slower() -> None:
    times = StepTimes()
    for _ in range(100):
        measured(times, 8, 0)
    for _ in range(200):
        measured(times, 8, 0, 2.0)
    assert times.cost.seconds(8) == pytest.approx(2 * TRUE.seconds(8), rel=0.05)


def test_one_late_step_of_few_tokens_is_no_cost_of_context() -> None:
    """50,000 tokens of context multiplied the error: a router predicted a wait of 100 s and refused requests."""
    times = StepTimes()
    for step in range(12):
        rows = 1 + step % 4
        times.observe(rows, 0, TRUE.seconds(rows) + (step % 3) * 1e-4, context=66 * rows)
    times.observe(1, 0, 2 * TRUE.seconds(1), context=1025)
    assert times.cost.seconds(49, context=50_000) < 2 * TRUE.seconds(49)


def test_ends_of_prompts_that_cost_nothing_beside_decode_rows_leave_the_cost_of_a_token() -> None:
    """On a GPU their few tokens use weights that are read for the decode rows anyway."""
    times, rng = StepTimes(), random.Random(1)
    for step in range(400):
        rows, tokens = rng.randrange(1, 20), rng.randrange(400, 600)
        if step % 5 == 4:
            tokens = rng.randrange(MIN_PROMPT_TOKENS, 64)
        measured(times, rows, 0)
        times.observe(rows, tokens, max(TRUE.seconds(rows, 500) * tokens / 500, 1.05 * TRUE.seconds(rows)))
        if step > 20:
            assert times.cost.seconds(10, 500) == pytest.approx(TRUE.seconds(10, 500), rel=0.25)
    assert times.cost.spread < 1.3


def test_contexts_are_told_from_rows_and_tokens() -> None:
    """Long and short requests, as a GPU computes them; rows and contexts come in proportion first."""
    true = StepCost(0.0043, 3e-6, 14e-9, 0.0005, 21.5e-6, 0.9e-9)
    times, rng = StepTimes(), random.Random(1)

    def measured_at(rows: int, context: int, tokens: int = 0, start: int = 0) -> None:
        pairs = num_pairs(start, tokens)
        factor = rng.uniform(0.97, 1.03)
        times.observe(rows, tokens, factor * true.seconds(rows, tokens, context, pairs), context, pairs)

    for _ in range(100):
        rows = rng.randrange(1, 100)
        measured_at(rows, 1000 * rows)
        measured_at(rows, 1000 * rows, rng.randrange(64, 800))
    short = times.cost.seconds(50, 500, 50_000, num_pairs(0, 500))
    assert short == pytest.approx(true.seconds(50, 500, 50_000, num_pairs(0, 500)), rel=0.05)
    for _ in range(600):
        rows, length = rng.randrange(1, 40), rng.randrange(500, 20_000)
        measured_at(rows, length * rows)
        measured_at(rows, length * rows, rng.randrange(64, 800), rng.randrange(30_000))
    for rows, context, tokens, start in ((8, 160_000, 0, 0), (100, 50_000, 0, 0), (10, 50_000, 500, 25_000)):
        pairs = num_pairs(start, tokens)
        expected = true.seconds(rows, tokens, context, pairs)
        assert times.cost.seconds(rows, tokens, context, pairs) == pytest.approx(expected, rel=0.07)


def test_proportional_sizes_stay_where_they_were() -> None:
    """A thousand steps with proportional rows and contexts give no wild slopes."""
    times, rng = StepTimes(), random.Random(1)
    for _ in range(1000):
        rows = rng.randrange(1, 60)
        times.observe(rows, 0, rng.uniform(0.9, 1.1) * TRUE.seconds(rows), 1000 * rows)
    cost = times.cost
    assert cost.row + 1000 * cost.context == pytest.approx(TRUE.row, rel=0.25)
    assert min(cost.base, cost.row, cost.context) >= 0
    assert TRUE.seconds(30) / 1.5 < cost.seconds(30, context=60_000) < 2.5 * TRUE.seconds(30)


def test_the_spread_is_what_few_steps_exceed() -> None:
    for wide in (1.04, 1.25):
        times, rng = StepTimes(), random.Random(1)
        beyond = 0
        for step in range(6000):
            rows, tokens = rng.randrange(1, 100), rng.randrange(64, 800)
            measured(times, rows, 0)
            seconds = rng.uniform(2 - wide, wide) * TRUE.seconds(rows, tokens)
            beyond += step > 2000 and seconds > times.cost.spread * times.cost.seconds(rows, tokens)
            times.observe(rows, tokens, seconds)
        assert beyond < 0.005 * 4000
        assert 0.95 * wide < times.cost.spread < 1.2 * wide  # predictions err, too
    for _ in range(1000):
        times.observe(50, 500, rng.choice([1.0, 1.0, 3.0]) * TRUE.seconds(50, 500))
    assert times.cost.spread <= WIDEST


def test_the_spread_of_steady_steps_is_learned_within_a_minute() -> None:
    times, rng = StepTimes(), random.Random(1)
    for _ in range(1200):
        rows, tokens = rng.randrange(1, 100), rng.randrange(64, 800)
        measured(times, rows, 0)
        measured(times, rows, tokens, rng.uniform(0.97, 1.03))
    assert 1.02 < times.cost.spread < 1.08
