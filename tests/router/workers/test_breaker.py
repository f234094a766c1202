"""A worker that fails again and again is left alone for a while."""

from __future__ import annotations

from router.workers.breaker import OPEN_SECONDS, Breaker


def test_breaker_opens_after_three_failures_close_together() -> None:
    breaker = Breaker()
    for time in (0.0, 10.0, 20.0, 21.0):
        breaker.record_failure(time)
        assert not breaker.is_open(time)
    breaker.record_failure(22.0)
    assert breaker.is_open(22.0)
    assert not breaker.is_open(22.0 + OPEN_SECONDS)
    breaker.record_failure(30.0)
    breaker.record_failure(30.1)
    breaker.record_success()
    breaker.record_failure(30.2)
    assert not breaker.is_open(30.2)
