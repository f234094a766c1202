"""Loads begin before the steps in flight end, unless these may touch the blocks; steps are late on purpose."""

from __future__ import annotations

import pytest

from engine.kv.manager import KVManager
from engine.request import Request, RequestId, SamplingParams
from engine.scheduled_step import ScheduledStep
from kvstore.pool.block_pool import BlockPool
from kvstore.types import HostSlot
from tests.engine.fakes import expected_tokens
from tests.engine.scheduling.engines import BLOCK, grouped, groups_of, run_all, with_host_tier
from tests.engine.scheduling.peer import PROMPT, finish, make_peer


def test_a_load_begins_before_the_steps_in_flight_have_ended() -> None:
    peer = make_peer(overlap=True, is_late=True)
    peer.engine.add_request([1, 2], SamplingParams(max_tokens=9))
    peer.step()
    request = peer.submit(PROMPT)
    peer.step()
    assert peer.num_early == 1
    peer.finish(peer.loads[0])
    finish(peer, request)


@pytest.mark.wing("engine.priorities")
def test_a_load_waits_for_the_step_of_a_request_that_gave_way_to_it() -> None:
    peer = make_peer(8, overlap=True, is_late=True)
    low = peer.engine.add_request([1] * 14, SamplingParams(max_tokens=9), priority=5)
    for _ in range(2):
        peer.step()
    assert low.num_preemptions == 0
    request = peer.submit(PROMPT)
    peer.step()
    assert low.num_preemptions == 1
    assert (len(peer.loads), peer.num_early) == (1, 0)
    peer.finish(peer.loads[0])
    finish(peer, request)
    assert low.output_token_ids == expected_tokens([1] * 14, 9)


@pytest.mark.wing("kvstore.tier")
def test_a_load_waits_for_the_copy_of_what_it_evicts() -> None:
    peer = make_peer(8, host_slots=16, is_late=True)
    peer.engine.add_request([2] * 28, SamplingParams(max_tokens=2))
    run_all(peer.engine)
    request = peer.submit(PROMPT)
    peer.step()
    assert peer.num_copies_out > 0
    assert (len(peer.loads), peer.num_early) == (1, 0)
    peer.finish(peer.loads[0])
    finish(peer, request)
    finish(peer, peer.engine.add_request([2] * 28, SamplingParams(max_tokens=2)), [2] * 28)


@pytest.mark.wing("engine.windows")
def test_a_step_may_read_what_a_window_leaves_behind() -> None:
    kv = grouped(BlockPool(32), groups_of((0, 6), 16))
    request = Request(RequestId("a"), list(range(40)), SamplingParams(max_tokens=1))
    assert kv.grow(request, 16)
    kv.launched(ScheduledStep())
    passed, request.num_computed_tokens = request.block_ids[1], 16
    assert kv.grow(request, 32)
    assert passed not in request.block_ids[:4]
    assert kv.is_used([passed], ScheduledStep())
    kv.in_flight.popleft()
    assert not kv.is_used([passed], ScheduledStep())


def test_blocks_of_a_lease_are_used_until_the_steps_have_ended() -> None:
    kv = KVManager(BlockPool(8), BLOCK, "test")
    leased, other = kv.pool.allocate(2)
    kv.launched(ScheduledStep())
    kv.launched(ScheduledStep())
    kv.give_back([leased])
    assert [kv.is_used([block], ScheduledStep()) for block in (leased, other)] == [True, False]
    kv.in_flight.popleft()
    assert kv.is_used([leased], ScheduledStep())
    kv.in_flight.popleft()
    assert not kv.is_used([leased], ScheduledStep())
    kv.give_back([other])
    assert not kv.is_used([other], ScheduledStep())


@pytest.mark.wing("kvstore.tier")
def test_blocks_of_copies_are_used_until_their_step_has_ended() -> None:
    kv = with_host_tier(4, BlockPool(8), groups_of((), 16), by_swap=False)
    copied, evicted, other = kv.pool.allocate(3)
    kv.launched(ScheduledStep(copies_in=[(HostSlot(0), copied)]))
    step = ScheduledStep(copies_out=[(evicted, HostSlot(1))])  # of the step that comes
    assert [kv.is_used([block], step) for block in (copied, evicted, other)] == [True, True, False]
    kv.launched(step)
    kv.in_flight.popleft()
    assert [kv.is_used([block], ScheduledStep()) for block in (copied, evicted)] == [False, True]
    kv.in_flight.popleft()
    assert not kv.is_used([evicted], ScheduledStep())
