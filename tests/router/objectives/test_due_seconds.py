"""When first tokens are due, and who goes ahead."""

from __future__ import annotations

from math import inf

import pytest

from common.objectives.chunks import FLAT_CHUNK_TOKENS
from kvstore.types import WorkerId
from router.objectives.objectives import AHEAD, LATEST, SLOWDOWN, Objectives
from router.routing.views import Candidate

OBJECTIVES = Objectives(ttft=1.0, itl=0.025)


def candidate(compute: float, queue: float = 0.0) -> Candidate:
    return Candidate(WorkerId("d"), None, 0.0, {"queue": queue, "compute": compute}, 0, 0, is_measured=True)


def due(compute: float, num_new: int = 1000, waited: float = 0.0, has_started: bool = False) -> float:
    return OBJECTIVES.due_seconds(candidate(compute), num_new, waited, has_started)


def test_a_first_token_is_due_in_proportion_to_its_prompt_and_by_the_objective() -> None:
    assert due(0.02) == pytest.approx(SLOWDOWN * 0.02)
    assert due(0.5) == due(5.0) == LATEST
    assert due(0.5, waited=0.4) == pytest.approx(LATEST - 0.4)
    assert 0 < due(0.5, waited=9.0) < 0.01
    assert Objectives(itl=0.025).due_seconds(candidate(0.5), 1000, 0.0, False) == SLOWDOWN * 0.5


def test_streams_go_before_short_prompts_and_these_before_others_for_a_minute() -> None:
    """In whatever order they come: a stream that waits for its KV is not kept by prompts that came long ago."""
    short = due(0.002, FLAT_CHUNK_TOKENS)
    assert 59 + due(0.5, has_started=True) < short < AHEAD + 59 < due(0.003, FLAT_CHUNK_TOKENS + 1)
    assert -inf < due(0.0, has_started=True)


def test_without_objectives_nothing_is_due() -> None:
    assert Objectives().due_seconds(candidate(0.02), 1000, 0.0, has_started=True) == 0.0
