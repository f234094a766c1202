"""Prompt chunks that meet an objective for the time between tokens."""

from __future__ import annotations

import pytest

from common.objectives.chunks import FLAT_CHUNK_TOKENS, MIN_CHUNK_TOKENS, chunk_work, tokens_in
from common.pairs import num_pairs
from common.step_times import StepCost, StepTimes

TRUE = StepCost(base=0.004, row=20e-6, prompt=0.001, prompt_token=20e-6)


def test_steps_with_prompts_correct_decode_rows_that_look_too_slow() -> None:
    """Under load every step has prompts, and an objective allows few prompt tokens in a slow step."""
    times, objective = StepTimes(), 0.025
    for step in range(40):
        rows = 1 + step % 3
        times.observe(rows, 0, 10 * TRUE.seconds(rows), context=20_000 * rows)
        times.observe(rows, 500, 10 * TRUE.seconds(rows, 500), context=20_000 * rows)
    for _ in range(20):
        decode = times.cost.seconds(3, context=60_000)
        tokens = tokens_in(times.cost, chunk_work(times.cost, objective, decode), 0)
        times.observe(3, int(tokens), TRUE.seconds(3, tokens), context=60_000)
    assert tokens > 6 * MIN_CHUNK_TOKENS


def test_chunks_end_in_time() -> None:
    decode = TRUE.seconds(50)
    assert TRUE.spread * (decode + TRUE.prompt + chunk_work(TRUE, 0.025, decode)) == pytest.approx(0.025)
    least = MIN_CHUNK_TOKENS * TRUE.prompt_token
    assert chunk_work(TRUE, 0.001, decode) == least  # rows alone take longer: prompts go on slowly
    assert chunk_work(TRUE, 0.025, 0.03) == FLAT_CHUNK_TOKENS * TRUE.prompt_token
    assert chunk_work(TRUE, 0.008, 0.03) == pytest.approx(0.004)  # half the objective
    assert chunk_work(StepCost(), 0.0, 0.0) == 0.0


def test_tokens_for_so_much_work() -> None:
    cost = StepCost(prompt_token=20e-6, prompt_context=1e-9)
    for start in (0, 1000, 30_000):
        num_tokens = tokens_in(cost, 0.01, start)
        assert cost.work(num_tokens, num_pairs(start, num_tokens)) == pytest.approx(0.01)
    assert tokens_in(cost, 0.01, 30_000) < tokens_in(cost, 0.01, 0) < 500
    assert tokens_in(StepCost(), 1.0, 0) == tokens_in(cost, -1.0, 0) == 0.0
