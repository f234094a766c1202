"""Requests that are refused because of their predicted wait."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import OverloadedError
from kvstore.types import WorkerId
from router.late_refusals.refusals import check_in_time
from router.routing.views import Candidate

MAX_WAIT = 60.0


def candidate(is_measured: bool = True, **terms: float) -> Candidate:
    known = {"queue": 0.0, "compute": 0.1, "slot": 0.0, "decode": 1.0, **terms}
    return Candidate(WorkerId("d"), None, 0, sum(known.values()), known, 0, is_measured)


@pytest.mark.parametrize(
    ("terms", "seconds_left"),
    [
        ({}, 2.0),
        ({}, 0.5),  # too long on an idle server, too: it gets the text that there is time for
        ({"queue": 59.0}, 590.0),
        ({"queue": 5.0, "slot": 5.0}, 15.0),
    ],
)
def test_what_can_be_in_time_is_admitted(terms: dict[str, Any], seconds_left: float) -> None:
    check_in_time(candidate(**terms), seconds_left, MAX_WAIT)


@pytest.mark.parametrize(
    ("terms", "seconds_left", "late", "come_back"),
    [
        ({"queue": 70.0}, 590.0, 10.1, 70.0),  # longer than anybody may wait
        ({"queue": 5.0}, 5.0, 1.6, 5.0),  # the answer would end after the deadline
        ({"slot": 30.0}, 20.0, 13.1, 30.0),
        ({"slot": 0.5}, 1.5, 0.25, 0.5),
        ({"queue": 3.0}, 0.5, 2.65, 3.0),  # has no time for its answer, and the wait alone is too long
    ],
)
def test_what_would_be_late_is_refused_until_those_who_wait_are_served(
    terms: dict[str, Any], seconds_left: float, late: float, come_back: float
) -> None:
    with pytest.raises(OverloadedError, match=f"{late:.1f} s late") as caught:
        check_in_time(candidate(**terms), seconds_left, MAX_WAIT)
    assert caught.value.retry_after_seconds == pytest.approx(come_back)


def test_nothing_is_refused_on_a_guess() -> None:
    check_in_time(candidate(is_measured=False, queue=1000.0), 1.0, MAX_WAIT)
