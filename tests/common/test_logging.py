"""Lines that a stranger can cause do not fill the log."""

from __future__ import annotations

import logging

import pytest

from common.logging import RateLimit


def test_each_line_of_code_has_its_share(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    logger = logging.Logger("limited")
    logger.addHandler(caplog.handler)
    logger.addFilter(RateLimit(burst=3, per_seconds=10.0, clock=lambda: now[0]))

    def say(number: int) -> None:
        logger.warning("%d from a stranger", number)

    for number in range(50):
        say(number)
    logger.warning("something else")
    assert caplog.messages == ["0 from a stranger", "1 from a stranger", "2 from a stranger", "something else"]
    caplog.clear()
    now[0] += 10.0
    say(51)
    say(52)
    assert caplog.messages == ["51 from a stranger (47 more like this were left out)", "52 from a stranger"]
    caplog.clear()
    now[0] += 10.0
    say(53)
    assert caplog.messages == ["53 from a stranger"]
