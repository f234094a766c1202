"""Phases of a request from the log's time line."""

from __future__ import annotations

from typing import Any

import pytest

from router.page.journeys import pulls, spans


def line(*events: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"after": name, "seconds": seconds} for name, seconds in events]


def leg(worker: str, queue: float = 0.0, pull: float = 0.0, **fields: Any) -> dict[str, Any]:
    tokens = {"pulled_tokens": 0, "prefetched_tokens": 0, "transport": None}
    return {"worker": worker, "queue_seconds": queue, "kv_pull_seconds": pull, **tokens, **fields}


def test_a_hand_off_is_queue_prefill_pull_and_decode() -> None:
    time_line = line(
        ("accepted", 0.001),
        ("prefill on p0", 0.1),
        ("first output on p0", 0.0),
        ("decode on d0", 0.05),
        ("first output on d0", 2.0),
    )
    found = spans(time_line, [leg("p0", queue=0.03), leg("d0", queue=0.01, pull=0.02)])
    assert found == [
        ("route", "", 0.001),
        ("queue", "p0", 0.03),
        ("prefill", "p0", 0.07),
        ("queue", "d0", 0.01),
        ("pull", "d0", 0.02),
        ("decode", "d0", pytest.approx(2.02)),
    ]


def test_kv_that_came_before_the_request_leaves_no_pull() -> None:
    time_line = line(("prefill on p0", 0.1), ("first output on p0", 0.0), ("decode on d0", 0.05))
    time_line += line(("first output on d0", 1.0))
    assert spans(time_line, [leg("p0"), leg("d0")]) == [("prefill", "p0", 0.1), ("decode", "d0", 1.05)]


def test_a_decode_worker_that_computes_the_prompt() -> None:
    found = spans(line(("decode on d0", 0.1), ("first output on d0", 1.0)), [leg("d0")])
    assert found == [("prefill", "d0", 0.1), ("decode", "d0", 1.0)]


def test_a_lost_worker_costs_a_wait_and_a_replay() -> None:
    time_line = line(
        ("decode on d0", 0.1),
        ("first output on d0", 1.0),
        ("moved: the connection to worker d0 was lost", 0.0),
        ("waiting for a decode worker", 3.0),
        ("decode on d1", 0.2),
        ("first output on d1", 1.0),
    )
    found = spans(time_line, [leg("d0"), leg("d1")])
    assert found[2:] == [("wait", "", 3.0), ("replay", "d1", 0.2), ("decode", "d1", 1.0)]


def test_a_leg_that_is_lost_before_its_first_output() -> None:
    time_line = line(("prefill on p0", 0.5), ("moved: lost", 0.0), ("decode on d0", 0.1), ("first output on d0", 1.0))
    assert spans(time_line, [leg("d0")]) == [("prefill", "p0", 0.5), ("replay", "d0", 0.1), ("decode", "d0", 1.0)]


def test_spans_sum_to_the_time_line_whatever_workers_say() -> None:
    time_line = line(("accepted", 0.1), ("decode on d0", 0.2), ("first output on d0", 0.3))
    found = spans(time_line, [leg("d0", queue=5.0, pull=5.0)])
    assert sum(seconds for _, _, seconds in found) == pytest.approx(0.6)


def test_pulls_are_between_consecutive_legs_of_different_workers() -> None:
    legs = [leg("p0"), leg("d0", 0.0, 0.01, pulled_tokens=30, prefetched_tokens=2, transport="shm"), leg("d1")]
    [found] = pulls({"workers": legs})
    assert found == {"from": "p0", "to": "d0", "tokens": 32, "seconds": 0.01, "transport": "shm"}
