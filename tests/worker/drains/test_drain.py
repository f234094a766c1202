"""A draining worker: its reports to routers, its refusals, and its end."""

from __future__ import annotations

import asyncio
import time

from protos import types_pb2 as pb
from tests.harness.waiting import until
from tests.worker.front.test_front import HANDLE, Attached
from worker.drains.drain import Drain
from worker.front.sessions import Session


def drain_of(attached: Attached) -> Drain:
    drain = attached.front.drain
    assert drain is not None
    drain.start(60.0, time.monotonic())
    return drain


async def test_a_drained_worker_ends_when_routers_know_of_it(attached: Attached) -> None:
    """By then their earlier requests have arrived: one that arrives at the end would have to move."""
    await anext(attached.reports)  # the snapshot
    drain = drain_of(attached)
    attached.command(drain_noted=pb.DrainNoted(num_drain_changes=drain.num_changes - 1))  # of an earlier one
    await asyncio.sleep(0.1)
    assert not attached.front.is_drained
    attached.command(drain_noted=pb.DrainNoted(num_drain_changes=drain.num_changes))
    await until(lambda: attached.front.is_drained)


async def test_a_draining_worker_takes_no_parts_of_prompts(attached: Attached) -> None:
    await anext(attached.reports)  # the snapshot
    offer = pb.KvOffer(request_id="r", kv_handle=HANDLE, block_keys=[b"key"])
    attached.command(prefetch=offer)
    taken = pb.Command(prefetch=offer)
    await attached.engine.until_sent(taken)
    drain_of(attached)
    attached.command(prefetch=offer)
    left = pb.Command(prefetch=pb.KvOffer(request_id="r", kv_handle=HANDLE))
    await attached.engine.until_sent(taken, left)


def test_a_router_that_does_not_say_that_it_knows_is_not_waited_for() -> None:
    drain, sessions = Drain(), [Session()]
    drain.start(60.0, 100.0)
    assert not drain.is_over(sessions, is_idle=True, now=101.0)
    assert drain.is_over(sessions, is_idle=True, now=102.0)
    assert not drain.is_over(sessions, is_idle=False, now=102.0)
    assert drain.is_over(sessions, is_idle=False, now=160.0)


def test_routers_are_told() -> None:
    drain, load = Drain(), pb.LoadReport(num_running=3)
    drain.start(grace_seconds=1.0, now=0.0)
    drain.tell(load)
    assert load == pb.LoadReport(num_running=3, draining=True, num_drain_changes=1)
