"""How fast a worker is, learnt from what it reports."""

from __future__ import annotations

import pytest

from protos import types_pb2 as pb
from router.routing.rates import WorkerRates


def test_rates_follow_what_was_measured() -> None:
    rates = WorkerRates()
    rates.observe_times(1000, pb.RequestTimes(prefill_seconds=0.5, num_cached_tokens=500), now=100.0)
    assert rates.prefill_tokens_per_second == 1000
    for number in range(30):
        rates.observe_times(1000, pb.RequestTimes(prefill_seconds=0.25, num_cached_tokens=500), now=101.0 + number)
    assert rates.prefill_tokens_per_second == pytest.approx(2000, rel=0.01)
    rates.observe_times(
        1000, pb.RequestTimes(prefill_seconds=9, num_cached_tokens=999), now=200.0
    )  # too short to tell
    assert rates.prefill_tokens_per_second == pytest.approx(2000, rel=0.01)
    rates.observe_times(100, pb.RequestTimes(kv_pull_seconds=0.1, num_pulled_tokens=100), now=200.0)
    assert rates.pull_tokens_per_second == pytest.approx(1000)
    rates.observe_load(pb.LoadReport(step_seconds=0.5, step_decode_tokens=1, step_prefill_tokens=100))
    assert rates.step_seconds == 0
    rates.observe_load(pb.LoadReport(step_seconds=0.01, step_decode_tokens=4))
    assert rates.step_seconds == 0.01


def test_rates_are_old_when_no_request_has_come_for_a_while() -> None:
    rates = WorkerRates()
    assert not rates.are_old(now=1000.0)  # there are none
    rates.submitted(100, 0.0, now=1000.0)
    assert not rates.are_old(now=1009.0)
    assert rates.are_old(now=1011.0)


def test_prompts_of_the_same_steps_share_their_time() -> None:
    rates = WorkerRates()
    for step in range(30):
        for _ in range(8):  # 8 prompts of 100 tokens in each step of 0.1 s
            rates.observe_times(100, pb.RequestTimes(prefill_seconds=0.1), now=100.0 + step * 0.1)
    assert rates.prefill_tokens_per_second == pytest.approx(8000, rel=0.2)
