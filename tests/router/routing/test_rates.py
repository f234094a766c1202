"""How fast a worker is, learnt from what it reports."""

from __future__ import annotations

import pytest

from protos import types_pb2 as pb
from router.routing.rates import WorkerRates


def test_rates_follow_what_was_measured() -> None:
    rates = WorkerRates()
    assert rates.prefill_tokens_per_second == rates.step_seconds == 0
    rates.observe_pull(pb.RequestTimes(kv_pull_seconds=0.1, num_pulled_tokens=100))
    rates.observe_pull(pb.RequestTimes(kv_pull_seconds=9.0, num_pulled_tokens=100, kv_pull_failed=True))
    assert rates.pull_tokens_per_second == pytest.approx(1000)
    for _ in range(5):
        rates.observe_load(pb.LoadReport(step_seconds=0.01, step_decode_tokens=4))
    assert rates.step_seconds == pytest.approx(0.01)
    for number in range(30):  # 8 prompts of 100 tokens in each step of 0.1 s, beside 4 that decode
        step = pb.LoadReport(step_seconds=0.11, step_decode_tokens=4, step_prefill_tokens=800 + number % 2)
        rates.observe_load(step)
    assert rates.prefill_tokens_per_second == pytest.approx(8000, rel=0.05)
    assert rates.step_seconds == pytest.approx(0.01)


def test_rates_are_old_when_no_request_has_come_for_a_while() -> None:
    rates = WorkerRates()
    assert not rates.are_old(now=1000.0)  # there are none
    rates.submitted(100, 0.0, now=1000.0)
    assert not rates.are_old(now=1009.0)
    assert rates.are_old(now=1011.0)
