"""Step costs are learned from measured steps."""

from __future__ import annotations

import random

import pytest

from common.step_times import MARGIN, MIN_CHUNK_TOKENS, StepCost, StepTimes, chunk_bounds

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


def test_chunks_end_in_time() -> None:
    gentle, most = chunk_bounds(TRUE, 0.025, 50)
    assert TRUE.seconds(50, most) <= MARGIN * 0.025 < TRUE.seconds(50, most + 1)
    assert 0 < gentle < most
    assert chunk_bounds(TRUE, 0.001, 50)[1] == MIN_CHUNK_TOKENS  # rows alone take longer: prompts go on slowly
    long = StepCost(base=0.004, prompt=0.01, prompt_token=20e-6)
    gentle, most = chunk_bounds(long, 0.025, 50)
    assert gentle == most  # a step with any prompt is long, so it is to be full
    assert chunk_bounds(StepCost(), 0.025, 1) == (MIN_CHUNK_TOKENS, MIN_CHUNK_TOKENS)


def test_the_fewest_tokens_that_keep_a_rate() -> None:
    num_tokens = TRUE.prompt_tokens_at_rate(10_000, 50)
    assert num_tokens / TRUE.seconds(50, num_tokens) == pytest.approx(10_000)
    assert TRUE.prompt_tokens_at_rate(60_000, 50) == float("inf")
