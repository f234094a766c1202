"""A worker's front with a rank that does as the test says: KV that nobody will ask for is given back at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import UnavailableError
from kvstore.pool.events import EventLog
from kvstore.pool.leases import LeaseMirror
from kvstore.types import Epoch
from protos import types_pb2 as pb
from worker import sessions
from worker.front import WorkerFront

HANDLE = {"lease_id": "lease", "epoch": 7, "num_tokens": 3, "block_ids": [1], "digests": [2], "lease_seconds": 10.0}


class EngineProcess:
    """Writes down what it is told; frames come from the test."""

    def __init__(self) -> None:
        self.ready = {"shm_socket": "", "cuda_socket": "", "needs_staging": False}
        self.submitted: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()
        self.released: list[tuple[str, int]] = []
        self.to_front: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def submit(self, name: str, fields: dict[str, Any]) -> None:
        self.submitted.put_nowait(name)

    def cancel(self, name: str) -> None:
        self.cancelled.put_nowait(name)

    def release(self, lease_id: str, epoch: int) -> None:
        self.released.append((lease_id, epoch))

    async def frames(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            yield await self.to_front.get()

    def prefilled(self, name: str) -> None:
        """A frame with the first token and the handle."""
        names = ("deltas", "failures", "granted", "ended_leases", "staged", "pulls", "stored", "removed")
        frame: dict[str, Any] = {part: [] for part in names}
        frame["deltas"] = [[name, [5], "prefilled", None, [], [], HANDLE, None]]
        self.to_front.put_nowait({**frame, "load": {"num_steps": 1}, "counters": {}})


class Attached:
    """A front, its rank, and one router's stream."""

    def __init__(self) -> None:
        self.rank = EngineProcess()
        self.front = WorkerFront(self.rank, EventLog(), LeaseMirror(Epoch(7)), pb.WorkerInfo())  # type: ignore[arg-type]
        self.commands: asyncio.Queue[pb.Command] = asyncio.Queue()
        self.reports = self.front.attach(self._read(), prefill_only=True)
        self.running = asyncio.create_task(self.front.run())

    async def _read(self) -> AsyncIterator[pb.Command]:
        while True:
            yield await self.commands.get()

    async def submit(self) -> str:
        """The name under which the rank knows the request."""
        self.commands.put_nowait(pb.Command(submit=pb.Submit(request_id="r", prompt_token_ids=[1, 2, 3])))
        await anext(self.reports)  # the snapshot
        return await asyncio.wait_for(self.rank.submitted.get(), 10)

    async def until_released(self) -> None:
        async with asyncio.timeout(10):
            while not self.rank.released:
                await asyncio.sleep(0.001)
        assert self.rank.released == [("lease", 7)]


@pytest.fixture
async def attached() -> AsyncIterator[Attached]:
    found = Attached()
    yield found
    found.running.cancel()
    await found.reports.aclose()  # type: ignore[attr-defined]


async def test_kv_of_a_request_cancelled_meanwhile_is_released(attached: Attached) -> None:
    name = await attached.submit()
    attached.commands.put_nowait(pb.Command(cancel=pb.Cancel(request_id="r")))
    await asyncio.wait_for(attached.rank.cancelled.get(), 10)
    attached.rank.prefilled(name)  # the rank had not heard of it
    await attached.until_released()


async def test_kv_that_was_reported_is_the_routers(attached: Attached) -> None:
    attached.rank.prefilled(await attached.submit())
    while not (report := await asyncio.wait_for(anext(attached.reports), 10)).deltas:
        pass
    assert report.deltas[0].kv_handle.lease_id == "lease"
    await attached.reports.aclose()  # type: ignore[attr-defined]
    assert attached.rank.released == []


async def test_kv_in_a_report_that_was_not_sent_is_released(attached: Attached) -> None:
    attached.rank.prefilled(await attached.submit())
    async with asyncio.timeout(10):
        while attached.front.num_open_requests:  # the report waits for the stream to be read
            await asyncio.sleep(0.001)
    await attached.reports.aclose()  # type: ignore[attr-defined]
    await attached.until_released()


async def test_a_router_that_does_not_keep_up_loses_its_stream(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await attached.submit()
    monkeypatch.setattr(sessions, "MAX_WAITING_REPORTS", 0)
    attached.rank.prefilled(name)
    await attached.until_released()
    with pytest.raises(UnavailableError, match="keep up"):
        await asyncio.wait_for(anext(attached.reports), 10)
