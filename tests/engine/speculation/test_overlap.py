"""The choice whether steps wait for tokens, on a clock that the steps advance."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.plan import StepSize
from engine.speculation.draft_length import DraftLengths
from engine.speculation.overlap import PATIENCE, MeasuredOverlap, Overlap

pytestmark = pytest.mark.wing("engine.speculation")
ROW = 1e-4
MAX_DRAFTS = 4


def run(
    acceptances: list[float], gap: float, num_rows: int = 8, base: float = 5e-3
) -> tuple[list[bool], list[float]]:
    """Run a step for each number of accepted drafts; if steps wait, a gap follows until the host has the tokens.

    Returns whether each waited, and its tokens per second relative to an overlapped step without drafts.
    """
    lengths, draw = DraftLengths(), random.Random(3)
    overlap = Overlap(lengths)
    waited, speeds = [], []
    for accepted in acceptances:
        acceptance = [[accepted] * MAX_DRAFTS for _ in range(num_rows)]
        overlap.decide(acceptance, num_rows, 64, 1000)
        waits = overlap.waits
        drafts = lengths.choose(acceptance, num_rows, 64, 1000) if waits else [0] * num_rows
        tokens = num_rows + sum(accepted ** (k + 1) for count in drafts for k in range(count))
        computed = num_rows + sum(drafts)
        seconds = (base + ROW * computed + gap * waits) * draw.uniform(0.99, 1.01)
        overlap.observe(StepSize(computed, 0, 1000, 0), seconds)
        waited.append(waits)
        speeds.append(tokens / seconds / (num_rows / (base + ROW * num_rows)))
    return waited, speeds


@pytest.mark.parametrize(
    ("acceptance", "gap", "least_speed"),
    [(0.02, 5e-4, 0.98), (0.15, 2e-3, 0.98), (0.9, 5e-4, 2.4)],
    ids=["no draft is right", "less than the gap costs", "drafts are right"],
)
def test_steps_wait_for_drafts_that_bring_more_than_the_gap_costs(
    acceptance: float, gap: float, least_speed: float
) -> None:
    """Other drafts would only speed up steps that wait anyway."""
    waited, speeds = run([acceptance] * 3000, gap)
    assert sum(waited) > 0.95 * len(waited) if least_speed > 1 else sum(waited) < 0.05 * len(waited)
    assert sum(speeds) / len(speeds) > least_speed


def test_a_change_is_noticed() -> None:
    waited, _ = run([0.02] * 600 + [0.9] * 300 + [0.02] * 300, gap=5e-4)
    assert not any(waited[500:600][-PATIENCE:])
    assert sum(waited[600:900]) > 250
    assert sum(waited[900:]) < 60


def test_prompts_teach_nothing() -> None:
    overlap = Overlap(DraftLengths())
    for _ in range(100):
        overlap.decide([], 4, 8, 100)
        overlap.observe(StepSize(4, 30, 100, 50), 1.0)
    assert overlap._lengths.best_speed([], 4, 8, 100) == 0.0


def run_measured(
    acceptances: list[float], drafting: float, rows: Callable[[int], int] = lambda _: 8, catching_up: float = 0.0
) -> tuple[list[bool], list[float]]:
    """Run likewise with drafts of a model, which takes `drafting` seconds for those of a step.

    rows: as a function of the step's number. catching_up: seconds of the first drafts after steps without drafts.
    """
    overlap, draw = MeasuredOverlap(DraftLengths()), random.Random(3)
    base, waited, speeds = 5e-3, [], []
    behind = True
    for number, accepted in enumerate(acceptances):
        num_rows = rows(number)
        overlap.decide([], num_rows, 64, 1000)
        waits = overlap.waits
        num_accepted = [0] * num_rows
        if waits:
            for row in range(num_rows):
                while num_accepted[row] < MAX_DRAFTS and draw.random() < accepted:
                    num_accepted[row] += 1
        computed = num_rows * (1 + MAX_DRAFTS * waits)
        seconds = (base + ROW * computed + drafting * waits) * draw.uniform(0.99, 1.01)
        seconds += catching_up * (waits and behind)
        behind = not waits
        overlap.observe(StepSize(computed, 0, 1000, 0), seconds)
        if waits:
            for number in num_accepted:
                overlap.count(number)
        waited.append(waits)
        speeds.append((num_rows + sum(num_accepted)) / seconds / (num_rows / (base + ROW * num_rows)))
    return waited, speeds


@pytest.mark.parametrize(
    ("accepted", "drafting", "waits", "least_speed"),
    [
        (0.02, 1e-3, (0.0, 0.02), 0.98),
        (0.02, 5e-3, (0.0, 0.02), 0.98),
        (0.9, 25e-3, (0.0, 0.03), 0.98),  # 4.1 tokens a step are no gain in 6 times the time
        (0.9, 2e-3, (0.95, 1.0), 2.1),  # of 2.16
    ],
)
def test_a_draft_model_is_used_where_it_is_right_and_fast(
    accepted: float, drafting: float, waits: tuple[float, float], least_speed: float
) -> None:
    waited, speeds = run_measured([accepted] * 6000, drafting)
    assert waits[0] <= sum(waited) / len(waited) <= waits[1]
    assert sum(speeds) / len(speeds) > least_speed


def test_trials_of_long_prompts_are_rare() -> None:
    """A draft model that must compute 64,000 tokens before its first draft is not tried again after 400 steps."""
    waited, speeds = run_measured([0.02] * 3000, 5e-3, catching_up=0.15)
    assert sum(waited) < 25
    assert len(speeds) / sum(1 / speed for speed in speeds) > 0.98


def test_a_draft_model_that_becomes_right_is_noticed() -> None:
    waited, _ = run_measured([0.02] * 3000 + [0.9] * 3300 + [0.02] * 300, 2e-3)
    assert not all(waited[2900:3000])
    assert sum(waited[6200:6300]) == 100
    assert sum(waited[6300:]) < 100


def test_more_rows_are_not_judged_by_few() -> None:
    """The time of overlapped steps of 64 rows does not follow from steps of one row: it is measured first."""
    waited, _ = run_measured([0.9] * 1400, 2e-3, lambda number: 1 if number < 1000 else 64)
    assert sum(waited[:1000]) > 950
    assert sum(waited[1000:1080]) < 80
    assert sum(waited[1080:]) == 320
