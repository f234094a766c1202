"""Adaptive placement keeps up with the better of fixed ones: two GPUs in simulated time."""

from __future__ import annotations

import random
from functools import cache

import pytest

from benchmarks.clusters.simulated import Cell, Comparison, cells_of
from cli.load.workload import TraceRow
from tests.router.objectives.test_simulation import CONVERSATIONS

# (prompt, output) tokens, as Azure's conversations have them: long prompts get short answers.
CHATS = ((1050, 400), (1100, 390), (980, 400), (400, 80), (90, 30), (4080, 45), (370, 150), (1200, 90))
NOISE = 0.01


@cache
def cells(lengths: tuple[tuple[int, int], ...], rate: float, seconds: float, seed: int = 3) -> list[Cell]:
    """Poisson arrivals of requests drawn from the lengths, the first 5 seconds not counted."""
    rng, at, rows = random.Random(seed), 0.0, []
    while at < seconds + 5.0:
        rows.append(TraceRow(at, *rng.choice(lengths)))
        at += rng.expovariate(rate)
    return cells_of("", rows, len(rows) / (seconds + 5.0), seconds, warm=5.0, seed=seed)


@pytest.mark.parametrize(
    ("lengths", "rate", "seconds"),
    [(CHATS, 10.0, 12.0), pytest.param(CHATS, 40.0, 30.0, marks=pytest.mark.soak), (CONVERSATIONS, 3.0, 24.0)],
)
def test_adaptive_is_as_good_as_the_better_of_the_others(
    lengths: tuple[tuple[int, int], ...], rate: float, seconds: float
) -> None:
    found = Comparison.of(cells(lengths, rate, seconds))
    assert found.goodput >= 1 - NOISE
    assert found.throughput >= 0.97
    assert found.ttft_p99_of_better <= 1.1


@pytest.mark.soak
def test_beyond_saturation_it_gives_the_throughput_of_aggregated_and_short_prompts_are_served_in_time() -> None:
    """Most first tokens of all clusters come later than the objective."""
    aggregated, static, adaptive = cells(CHATS, 75.0, 15.0)
    assert aggregated.ttft_ms["p99"] > 1000.0
    assert adaptive.tokens_per_second >= 0.97 * aggregated.tokens_per_second
    assert adaptive.tokens_per_second > 1.2 * static.tokens_per_second
    assert adaptive.good_per_second > 9.0 > 9 * max(aggregated.good_per_second, static.good_per_second)
    assert adaptive.itl_ms["p99"] <= 25.0
