"""Whether steps wait for tokens, on a clock that steps themselves move on."""

from __future__ import annotations

import random

import pytest

from engine.plan import StepSize
from engine.speculation.draft_length import DraftLengths
from engine.speculation.overlap import PATIENCE, Overlap

pytestmark = pytest.mark.wing("engine.speculation")
ROW = 1e-4
MAX_DRAFTS = 4


def run(
    acceptances: list[float], gap: float, num_rows: int = 8, base: float = 5e-3
) -> tuple[list[bool], list[float]]:
    """A step for each acceptance of drafts, whose tokens come to the host after a gap where steps wait.

    Returns whether each waited, and its tokens per second over those of an overlapped step without drafts.
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


def test_steps_overlap_where_no_draft_is_right() -> None:
    waited, speeds = run([0.02] * 3000, gap=5e-4)
    assert sum(waited) < 0.05 * len(waited)
    assert sum(speeds) / len(speeds) > 0.98


def test_steps_wait_for_drafts_that_are_right() -> None:
    waited, speeds = run([0.9] * 3000, gap=5e-4)
    assert sum(waited) > 0.95 * len(waited)
    assert sum(speeds) / len(speeds) > 2.4


def test_a_change_is_noticed() -> None:
    waited, _ = run([0.02] * 600 + [0.9] * 300 + [0.02] * 300, gap=5e-4)
    assert not any(waited[500:600][-PATIENCE:])
    assert sum(waited[600:900]) > 250
    assert sum(waited[900:]) < 60


def test_drafts_that_bring_less_than_the_gap_costs() -> None:
    """They would raise the speed of steps that wait anyway."""
    waited, speeds = run([0.15] * 3000, gap=2e-3)
    assert sum(waited) < 0.05 * len(waited)
    assert sum(speeds) / len(speeds) > 0.98


def test_prompts_teach_nothing() -> None:
    overlap = Overlap(DraftLengths())
    for _ in range(100):
        overlap.decide([], 4, 8, 100)
        overlap.observe(StepSize(4, 30, 100, 50), 1.0)
    assert overlap._lengths.best_speed([], 4, 8, 100) == 0.0
