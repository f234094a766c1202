"""A worker's front with a scripted engine: KV that no reader will ask for is released at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from common.errors import InvalidRequestError, UnavailableError
from common.token_ids import pack_ids
from common.wings import has_wing
from engine.request import FinishReason, RequestId
from protos import types_pb2 as pb
from tests.harness.waiting import until
from worker.front import front, sessions
from worker.front.front import WorkerFront
from worker.messages import Command, Delta, StepReport, ToEngine
from worker.protobuf import failure_of

HANDLE = pb.KvHandle(lease_id="lease", worker_id="w", epoch=7, shards=[b"unread"])
RELEASE = pb.Command(release=pb.Release(lease_id="lease", epoch=7))
SAMPLING = pb.SamplingParams(max_tokens=1)


def cancel(request_id: str) -> pb.Command:
    return pb.Command(cancel=pb.Cancel(request_id=request_id))


class EngineProcess:
    """Records its commands; reports come from the test."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.submitted: asyncio.Queue[pb.Submit] = asyncio.Queue()
        self.others: list[pb.Command] = []
        self.to_front: asyncio.Queue[StepReport] = asyncio.Queue()

    def send(self, message: ToEngine) -> None:
        assert isinstance(message, Command)
        command = pb.Command.FromString(message.data)
        if command.HasField("submit"):
            self.submitted.put_nowait(command.submit)
        else:
            self.others.append(command)

    async def reports(self) -> AsyncIterator[StepReport]:
        while True:
            yield await self.to_front.get()

    def prefilled(self, request_id: RequestId) -> None:
        """Report the first token and the handle."""
        delta = Delta(request_id, [5], FinishReason.PREFILLED, handle=HANDLE.SerializeToString())
        self.to_front.put_nowait(StepReport([delta]))

    def offers(self, request_id: RequestId) -> None:
        """Report a part of the prompt."""
        offer = pb.KvOffer(request_id=request_id, kv_handle=HANDLE, block_keys=[b"key"])
        self.to_front.put_nowait(StepReport(offers=[offer.SerializeToString()]))

    async def until_sent(self, *commands: pb.Command) -> None:
        await until(lambda: len(self.others) >= len(commands))
        assert self.others == list(commands)


Report = Callable[[EngineProcess, RequestId], None]


class Attached:
    """A front, its engine, and one router's stream."""

    def __init__(self) -> None:
        self.engine = EngineProcess()
        self.front = WorkerFront(self.engine, pb.WorkerInfo(epoch=7))  # type: ignore[arg-type]
        self.commands: asyncio.Queue[pb.Command] = asyncio.Queue()
        self.reports = self.front.attach(self._read())
        self.running = asyncio.create_task(self.front.run())

    async def _read(self) -> AsyncIterator[pb.Command]:
        while True:
            yield await self.commands.get()

    async def submit(self) -> RequestId:
        """Submit a request; return the engine's id for it."""
        self.command(submit=pb.Submit(request_id="r", prompt_token_ids=pack_ids([1, 2, 3]), sampling=SAMPLING))
        await anext(self.reports)  # the snapshot
        return RequestId((await asyncio.wait_for(self.engine.submitted.get(), 60)).request_id)

    def command(self, **kind: Any) -> None:
        self.commands.put_nowait(pb.Command(**kind))


@pytest.fixture
async def attached() -> AsyncIterator[Attached]:
    found = Attached()
    yield found
    found.running.cancel()
    await found.reports.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("report", [EngineProcess.prefilled, EngineProcess.offers])
async def test_kv_of_a_request_cancelled_meanwhile_is_released(attached: Attached, report: Report) -> None:
    request_id = await attached.submit()
    attached.command(cancel=pb.Cancel(request_id="r"))
    await attached.engine.until_sent(cancel(request_id))
    report(attached.engine, request_id)  # the engine had not heard of it
    await attached.engine.until_sent(cancel(request_id), RELEASE)


async def test_kv_that_was_reported_is_the_routers(attached: Attached) -> None:
    attached.engine.prefilled(await attached.submit())
    while not (report := await asyncio.wait_for(anext(attached.reports), 60)).deltas:
        pass
    assert report.deltas[0].kv_handle == HANDLE
    await attached.reports.aclose()  # type: ignore[attr-defined]
    assert attached.engine.others == []


async def test_an_offer_goes_to_its_router_and_from_there_to_the_engine(attached: Attached) -> None:
    attached.engine.offers(await attached.submit())
    while not (report := await asyncio.wait_for(anext(attached.reports), 60)).kv_offers:
        pass
    [offer] = report.kv_offers
    assert offer == pb.KvOffer(request_id="r", kv_handle=HANDLE, block_keys=[b"key"])
    attached.command(prefetch=offer)
    await attached.engine.until_sent(pb.Command(prefetch=offer))


async def test_kv_in_a_report_that_was_not_sent_is_released(attached: Attached) -> None:
    attached.engine.prefilled(await attached.submit())
    async with asyncio.timeout(60):
        while attached.front.num_open_requests:  # the report waits for the stream to be read
            await asyncio.sleep(0.001)
    await attached.reports.aclose()  # type: ignore[attr-defined]
    await attached.engine.until_sent(RELEASE)


@pytest.mark.parametrize("report", [EngineProcess.prefilled, EngineProcess.offers])
async def test_a_router_that_does_not_keep_up_loses_its_stream(
    attached: Attached, monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    request_id = await attached.submit()
    monkeypatch.setattr(sessions, "MAX_WAITING_REPORTS", 0)
    report(attached.engine, request_id)
    async with asyncio.timeout(60):
        while RELEASE not in attached.engine.others:
            await asyncio.sleep(0.001)
    open_on_close = [] if report is EngineProcess.prefilled else [cancel(request_id)]
    assert attached.engine.others == [*open_on_close, RELEASE]
    with pytest.raises(UnavailableError, match="keep up"):
        await asyncio.wait_for(anext(attached.reports), 60)


async def test_another_router_can_neither_reuse_nor_cancel_an_open_request(attached: Attached) -> None:
    request_id = await attached.submit()
    commands: asyncio.Queue[pb.Command] = asyncio.Queue()
    for command in (pb.Command(cancel=pb.Cancel(request_id="r")), pb.Command(submit=pb.Submit(request_id="r"))):
        commands.put_nowait(command)

    async def read() -> AsyncIterator[pb.Command]:
        while True:
            yield await commands.get()

    async with aclosing(attached.front.attach(read())) as reports:  # type: ignore[type-var]
        while not (report := await asyncio.wait_for(anext(reports), 60)).failures:
            pass
    assert [failure.message for failure in report.failures] == ["this request id is in use"]
    assert attached.engine.others == []
    attached.engine.prefilled(request_id)
    while not (report := await asyncio.wait_for(anext(attached.reports), 60)).deltas:
        pass


async def test_a_failure_ends_the_request_under_the_routers_id(attached: Attached) -> None:
    failure = failure_of(InvalidRequestError("why", "temperature"), await attached.submit())
    attached.engine.to_front.put_nowait(StepReport(failures=[failure.SerializeToString()]))
    while not (report := await asyncio.wait_for(anext(attached.reports), 60)).failures:
        pass
    failure.request_id = "r"
    assert list(report.failures) == [failure]
    assert attached.front.num_open_requests == 0


async def test_what_routers_are_told_of_the_load_is_the_engines_and_both_processes_memory(attached: Attached) -> None:
    await attached.submit()
    attached.front.measure_memory()
    load = pb.LoadReport(num_running=3, kv_blocks_total=10)
    attached.engine.to_front.put_nowait(StepReport(load=load.SerializeToString()))
    await until(lambda: attached.front.load == load)
    attached.front.heartbeat()
    told = (await asyncio.wait_for(anext(attached.reports), 60)).load
    assert (told.num_running, told.kv_blocks_total) == (3, 10)
    if has_wing("common.resident"):
        assert min(told.front_private_bytes, told.engine_private_bytes) > 0


async def test_a_router_whose_command_meets_a_bug_loses_its_stream(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its next commands would not be read, and requests would hang until their deadline."""

    def fail(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(front, "Command", fail)
    attached.command(prefetch=pb.KvOffer())
    await anext(attached.reports)  # the snapshot
    with pytest.raises(UnavailableError, match="could not be carried out"):
        await asyncio.wait_for(anext(attached.reports), 10)
