"""The order of service, admission and preemption: by priority, which is the default, and first come, first served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.engine import Engine
from engine.request import FinishReason, Request, RequestStatus, SamplingParams
from engine.scheduling.order import ServiceOrder
from tests.engine.driving import finish
from tests.engine.fakes import expected_tokens
from tests.engine.scheduling.engines import assert_quiet, make_engine, run_all

LONG = SamplingParams(max_tokens=12)
on_all_paths = pytest.mark.parametrize(("swap", "overlap"), [(s, o) for s in (False, True) for o in (False, True)])


def start(engine: Engine, prompts: list[list[int]], priority: int = 5) -> list[Request]:
    """Add requests and step until all of them run and have a token."""
    requests = [engine.add_request(prompt, LONG, priority=priority) for prompt in prompts]
    for _ in range(10):
        if all(request.output_token_ids for request in requests):
            return requests
        engine.step()
    raise AssertionError("they do not fit")


def assert_undisturbed(requests: list[Request]) -> None:
    for request in requests:
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, request.params.max_tokens)


@pytest.mark.wing("kvstore.tier")
@on_all_paths
def test_an_urgent_request_takes_the_seat_of_the_least_urgent(swap: bool, overlap: bool) -> None:
    engine, runner = make_engine(64, host_slots=32, max_num_seqs=2, swap=swap, overlap=overlap, prefix_cache=False)
    requests = start(engine, [[1] * 5, [2] * 5])
    urgent = engine.add_request([3] * 5, LONG, priority=0)
    engine.step()
    assert urgent.status is RequestStatus.RUNNING
    assert requests[0].num_preemptions == 0
    assert requests[1].status is (RequestStatus.SWAPPED if swap else RequestStatus.WAITING)
    run_all(engine)
    assert_undisturbed([*requests, urgent])
    assert (urgent.num_preemptions, engine.load().num_preemptions) == (0, 1)
    assert (runner.num_computed_tokens == 3 * (5 + 11)) is swap  # what was swapped is not computed again
    assert_quiet(engine)


@pytest.mark.wing("kvstore.tier")
@on_all_paths
def test_an_urgent_request_takes_the_blocks_of_the_least_urgent(swap: bool, overlap: bool) -> None:
    engine, _ = make_engine(12, host_slots=32, swap=swap, overlap=overlap)
    requests = start(engine, [[1] * 7, [2] * 7, [3] * 7])
    urgent = engine.add_request([4] * 17, LONG, priority=0)  # 5 blocks: those of two
    engine.step()
    assert urgent.status is RequestStatus.RUNNING
    assert [request.num_preemptions for request in requests] == [0, 1, 1]
    run_all(engine)
    assert_undisturbed([*requests, urgent])
    assert urgent.num_preemptions == 0
    assert_quiet(engine)


def test_nobody_is_preempted_in_vain() -> None:
    """The blocks of the only preemptible request are not enough."""
    engine, _ = make_engine(12)
    requests = [*start(engine, [[1] * 21], priority=1), *start(engine, [[2] * 7], priority=5)]
    engine.add_request([3] * 25, LONG, priority=2)
    engine.step()
    assert [request.num_preemptions for request in requests] == [0, 0]
    assert [request.status for request in requests] == [RequestStatus.RUNNING] * 2
    run_all(engine)


@pytest.mark.parametrize("priority", [5, 6])
def test_equal_and_less_urgent_requests_wait(priority: int) -> None:
    engine, _ = make_engine(64, max_num_seqs=2)
    start(engine, [[1] * 5, [2] * 5])
    later = engine.add_request([3] * 5, LONG, priority=priority)
    engine.step()
    assert later.status is RequestStatus.WAITING
    run_all(engine)
    assert engine.load().num_preemptions == 0


def test_a_full_batch_is_no_work_for_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine(64, max_num_seqs=2)
    start(engine, [[1] * 5, [2] * 5])
    engine.add_request([3] * 5, LONG, priority=5)
    monkeypatch.setattr(engine.kv.prefixes, "cached_table", pytest.fail)
    engine.step()


@pytest.mark.wing("kvstore.tier")
@pytest.mark.parametrize("overlap", [False, True])
def test_swapped_requests_do_not_block_a_more_urgent_one(overlap: bool) -> None:
    engine, _ = make_engine(12, host_slots=32, swap=True, overlap=overlap)
    requests = start(engine, [[i + 1] * 7 for i in range(4)])
    while not engine.load().num_swapped:
        engine.step()
    urgent = engine.add_request([9] * 5, SamplingParams(max_tokens=2), priority=0)
    equal = engine.add_request([8] * 5, SamplingParams(max_tokens=2), priority=5)
    engine.step()
    assert urgent.status is RequestStatus.RUNNING
    assert engine.load().num_swapped
    assert equal.status is RequestStatus.WAITING
    run_all(engine)
    assert_undisturbed([*requests, urgent, equal])
    assert_quiet(engine)


def test_a_long_prompt_leaves_the_step_to_an_urgent_one() -> None:
    """The urgent request gets the token budget without a preemption."""
    engine, runner = make_engine(64, budget=8)
    long = engine.add_request(list(range(1, 61)), LONG, priority=5)
    engine.step()
    urgent = engine.add_request([3] * 5, LONG, priority=0)
    engine.step()
    assert len(urgent.output_token_ids) == 1
    run_all(engine)
    assert_undisturbed([long, urgent])
    assert engine.load().num_preemptions == 0
    assert runner.num_computed_tokens == 60 + 5 + 2 * 11  # nothing was lost


def test_each_is_preempted_once_by_each_more_urgent_one() -> None:
    """No ping-pong: one seat, every newcomer more urgent than those before it."""
    engine, _ = make_engine(64, max_num_seqs=1)
    requests = []
    for priority in (3, 2, 1, 0):
        requests += start(engine, [[priority + 1] * 5], priority)
    order = [output.request for output in finish(engine) if output.finish_reason is FinishReason.LENGTH]
    assert order == requests[::-1]
    assert [request.num_preemptions for request in requests] == [1, 1, 1, 0]
    assert_undisturbed(requests)


def test_a_computed_prompt_keeps_its_blocks_for_its_lease() -> None:
    """Its first token is pending: it ends with the step in flight, and a peer will read its blocks."""
    engine, _ = make_engine(64, max_num_seqs=1, overlap=True)
    prefill = engine.add_request([1] * 9, LONG, priority=5, prefill_only=True)
    engine.step()
    urgent = engine.add_request([2] * 5, LONG, priority=0)
    [output] = engine.step().outputs
    assert (output.request, output.finish_reason) == (prefill, FinishReason.PREFILLED)
    blocks = engine.kv.detach(prefill, prefill.num_known_tokens - 1)
    assert len(blocks) == 3
    engine.kv.pool.release(blocks)
    run_all(engine)
    assert_undisturbed([urgent])


@pytest.mark.wing("kvstore.tier")
@pytest.mark.parametrize("windows", [(), pytest.param((0, 6), marks=pytest.mark.wing("engine.windows"))])
def test_who_is_handed_over_and_gives_way_with_its_last_token_leaves_nothing(windows: tuple[int, ...]) -> None:
    """Its KV is in host slots when that token arrives, and is never swapped in."""
    engine, _ = make_engine(6 * max(len(windows), 1), host_slots=32, swap=True, overlap=True, windows=windows)
    params = replace(LONG, max_tokens=16)
    kept, moved = (engine.add_request([number] * 5, params) for number in (1, 2))
    for _ in range(8):
        engine.step()
    engine.hand_over(moved.request_id)
    outputs = engine.step().outputs
    assert [output.finish_reason for output in outputs if output.request is moved] == [FinishReason.PREFILLED]
    assert moved.num_preemptions == 1
    assert engine.kv.detach(moved, moved.num_known_tokens - 1) == []
    run_all(engine)
    assert_undisturbed([kept])
    assert_quiet(engine)


def test_fcfs_knows_no_priority() -> None:
    engine, _ = make_engine(64, max_num_seqs=1, order=ServiceOrder())
    requests = start(engine, [[1] * 5])
    requests += [engine.add_request([2] * 5, LONG, priority=9), engine.add_request([3] * 5, LONG, priority=0)]
    assert [output.request for output in finish(engine) if output.finish_reason] == requests
    assert engine.load().num_preemptions == 0
