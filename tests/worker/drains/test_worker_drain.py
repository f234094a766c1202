"""A drained worker finishes its requests within a time limit and ends; until then the drain can be undone."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from common.net.rpc import open_channel
from protos import types_pb2 as pb
from tests.harness.worker import MINUTE_LONG, SLOW, Stream, Worker, attached, prefill, running

pytestmark = pytest.mark.wing("engine.simulated")  # steps that take their time


@pytest.fixture
def prefill_worker(tmp_path: Path) -> Iterator[Worker]:
    with running(Worker("prefill", tmp_path, engine=SLOW)) as workers:
        yield workers["prefill"]


@pytest.fixture
def decode_worker(tmp_path: Path) -> Iterator[Worker]:
    with running(Worker("decode", tmp_path, engine=SLOW)) as workers:
        yield workers["decode"]


@asynccontextmanager
async def drained(worker: Worker, grace_seconds: float) -> AsyncIterator[Stream]:
    """Attach a stream and drain the worker while requests are open: "open" waits for "long" to end."""
    async with attached(worker) as stream, open_channel(worker.address) as channel:
        await stream.submit("long", sampling=MINUTE_LONG)
        await stream.submit("open")
        while stream.load.num_waiting == 0:
            await stream.report()
        reply = await worker.stub(channel).Drain(pb.DrainRequest(grace_seconds=grace_seconds), timeout=60)
        assert reply.num_open_requests == 2
        while not stream.load.draining:
            await stream.report()
        yield stream


async def test_the_grace_period_ends_a_drain(decode_worker: Worker) -> None:
    async with drained(decode_worker, grace_seconds=1.0) as stream:
        await stream.until_broken()  # the router moves what is left
        assert stream.load.num_running == stream.load.num_waiting == 1
    assert await decode_worker.exit_code() == 0


async def test_undrain_takes_a_worker_back_until_sigterm_drains_it(decode_worker: Worker) -> None:
    """Both times open requests end and new ones are refused; then the process exits with 0."""
    async with drained(decode_worker, grace_seconds=60.0) as stream, open_channel(decode_worker.address) as channel:
        stub = decode_worker.stub(channel)
        await stream.submit("early")
        assert (await stream.failure_of("early")).code == pb.FAILURE_CODE_UNAVAILABLE
        await stub.Undrain(pb.UndrainRequest(), timeout=60)
        await stream.cancel("long")
        await stream.submit("new")
        assert (await stream.until_end("new"))[1].finish_reason == pb.FINISH_REASON_LENGTH
        await stream.submit("second", sampling=MINUTE_LONG)
        await stream.submit("behind")
        while stream.load.num_waiting == 0:
            await stream.report()
        decode_worker.service.signal(signal.SIGTERM)
        while not stream.load.draining:
            await stream.report()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Undrain(pb.UndrainRequest(), timeout=60)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await stream.submit("late")
        assert (await stream.failure_of("late")).code == pb.FAILURE_CODE_UNAVAILABLE
        await stream.cancel("second")
        assert (await stream.until_end("behind"))[1].finish_reason == pb.FINISH_REASON_LENGTH
    assert await decode_worker.exit_code() == 0


async def test_a_draining_prefill_worker_waits_for_its_readers(prefill_worker: Worker) -> None:
    """A request between prefill and decode: its KV stays readable, and the worker ends once it is released."""
    async with attached(prefill_worker) as stream, open_channel(prefill_worker.address) as channel:
        _, handle = await prefill(stream, "p")
        await prefill_worker.stub(channel).Drain(pb.DrainRequest(grace_seconds=60.0), timeout=60)
        while not stream.load.draining:
            await stream.report()
        assert prefill_worker.service.is_alive()
        assert stream.load.num_leases == 1
        await stream.release(handle.lease_id, handle.epoch)
        await stream.until_broken()
    assert await prefill_worker.exit_code() == 0
