"""Rates of workers and answers, as the router measures them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from common.step_times import StepCost
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.routing.policy import choose
from router.routing.rates import ARRIVAL_SECONDS, OLD_SECONDS, AnswerLength, DrainRate, WorkerRates
from router.routing.views import Candidate, RequestView, WorkerView


def test_answers_are_as_long_as_the_ones_before() -> None:
    answers = AnswerLength()
    assert answers.expected(1000) == 64
    assert answers.expected(10) == 10
    for _ in range(200):
        answers.observe(20)
    assert answers.expected(1000) == 20
    answers.observe(40)
    assert answers.expected(1000) == pytest.approx(21)


def overloaded(num_open: int, **fields: Any) -> Candidate:
    step = StepCost(base=0.01, prompt_token=0.001)
    worker = WorkerView(WorkerId("d"), num_running=num_open, step=step, num_slots=8, **fields)
    return choose("cost", RequestView(10, {}, expected_tokens=100), [], [worker], 64).chosen


def test_the_wait_for_a_slot_grows_with_the_requests_ahead() -> None:
    assert overloaded(7).terms["slot"] == 0
    assert overloaded(8).terms["slot"] == pytest.approx(100 * 0.01 / 8)  # the first of eight to end
    assert overloaded(15).terms["slot"] == pytest.approx(100 * 0.01)  # all eight


def drained(per_second: float, seconds: float) -> DrainRate:
    """Measure a rate from second 100 on, with a queue all the time."""
    rate = DrainRate()
    rate.began(100.0)
    for number in range(int(seconds * per_second)):
        rate.observe(100.0 + (number + 1) / per_second)
    return rate


def test_a_queue_takes_its_length_over_the_rate_of_first_tokens() -> None:
    assert DrainRate().seconds(256, now=5.0) == 0.0  # not measured
    assert drained(per_second=8.0, seconds=20.0).seconds(256, now=120.0) == pytest.approx(32.0, rel=0.01)


def test_time_without_a_queue_does_not_slow_the_rate_down_and_time_without_a_token_does() -> None:
    rate = drained(per_second=8.0, seconds=20.0)
    assert rate.seconds(256, now=125.0) > 60.0
    rate.began(1000.0)
    assert rate.seconds(256, now=1000.0) == pytest.approx(32.0, rel=0.01)
    rate.observe(1000.1)
    assert rate.seconds(256, now=1000.1) == pytest.approx(32.0, rel=0.02)


def test_the_rate_follows_a_change_within_seconds() -> None:
    rate = drained(per_second=8.0, seconds=20.0)
    for number in range(40):
        rate.observe(120.0 + (number + 1) / 2.0)
    assert rate.seconds(10, now=140.0) == pytest.approx(5.0, rel=0.1)


def test_rates_follow_what_was_measured() -> None:
    rates = WorkerRates()
    assert rates.step_times.cost.prompt_token == rates.step_times.cost.seconds(1) == 0
    rates.observe_pull(pb.RequestTimes(kv_pull_seconds=0.1, num_pulled_tokens=100))
    rates.observe_pull(pb.RequestTimes(kv_pull_seconds=9.0, num_pulled_tokens=100, kv_pull_failed=True))
    assert rates.pull_tokens_per_second == pytest.approx(1000)
    rates.observe_pull(pb.RequestTimes(kv_pull_seconds=0.1, num_pulled_tokens=200))
    assert rates.pull_tokens_per_second == pytest.approx(1200)  # a fifth of what is new
    rates.observe_pull(pb.RequestTimes(num_pulled_tokens=200))  # too quick to be measured
    assert rates.pull_tokens_per_second == pytest.approx(1200)
    rates.observe_answer(10, 1.0)
    rates.observe_answer(0, 9.0)
    assert rates.token_seconds == pytest.approx(0.1)
    for _ in range(5):
        rates.observe_load(pb.LoadReport(step_seconds=0.01, step_decode_tokens=4))
    assert rates.step_times.cost.seconds(1) == pytest.approx(0.01)
    for number in range(30):  # 8 prompts of 100 tokens in each step of 0.1 s, beside 4 that decode
        step = pb.LoadReport(step_seconds=0.11, step_decode_tokens=4, step_prefill_tokens=800 + number % 2)
        rates.observe_load(step)
    assert 1 / rates.step_times.cost.prompt_token == pytest.approx(8000, rel=0.05)
    assert rates.step_times.cost.seconds(1) == pytest.approx(0.01)


def test_arrivals_are_forgotten_within_seconds_and_rates_are_old_when_none_has_come_for_a_while() -> None:
    rates = WorkerRates()
    assert not rates.are_old(now=1000.0)  # there are none
    rates.submitted(100, 700.0, now=1000.0)
    rates.submitted(0, 0.0, now=1000.0)  # its KV comes from elsewhere
    assert rates.arrivals(now=1000.0) == pytest.approx(
        (100 / ARRIVAL_SECONDS, 700 / ARRIVAL_SECONDS, 1 / ARRIVAL_SECONDS)
    )
    later = 1000.0 + ARRIVAL_SECONDS
    assert rates.arrivals(later) == pytest.approx([each / math.e for each in rates.arrivals(now=1000.0)])
    rates.submitted(100, 700.0, later)
    fresh = 1 + 1 / math.e
    assert rates.arrivals(later) == pytest.approx([fresh * each / ARRIVAL_SECONDS for each in (100, 700, 1)])
    assert not rates.are_old(later + OLD_SECONDS)
    assert rates.are_old(later + OLD_SECONDS + 0.1)
