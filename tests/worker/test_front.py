"""A worker's front with an engine that does as the test says: KV that nobody will ask for is given back at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import UnavailableError
from kvstore.pool.leases import LeaseMirror
from kvstore.types import Epoch
from protos import types_pb2 as pb
from worker import sessions
from worker.front import WorkerFront

HANDLE = {
    "lease_id": "lease", "worker_id": "w", "epoch": 7, "num_tokens": 3, "lease_seconds": 10.0, "shards": [b"unread"]
}  # fmt: skip


class EngineProcess:
    """Writes down what it is told; frames come from the test."""

    def __init__(self) -> None:
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
    """A front, its engine, and one router's stream."""

    def __init__(self) -> None:
        self.engine = EngineProcess()
        self.front = WorkerFront(self.engine, LeaseMirror(Epoch(7)), pb.WorkerInfo())  # type: ignore[arg-type]
        self.commands: asyncio.Queue[pb.Command] = asyncio.Queue()
        self.reports = self.front.attach(self._read(), prefill_only=True)
        self.running = asyncio.create_task(self.front.run())

    async def _read(self) -> AsyncIterator[pb.Command]:
        while True:
            yield await self.commands.get()

    async def submit(self) -> str:
        """The name under which the engine knows the request."""
        self.commands.put_nowait(pb.Command(submit=pb.Submit(request_id="r", prompt_token_ids=[1, 2, 3])))
        await anext(self.reports)  # the snapshot
        return await asyncio.wait_for(self.engine.submitted.get(), 10)

    async def until_released(self) -> None:
        async with asyncio.timeout(10):
            while not self.engine.released:
                await asyncio.sleep(0.001)
        assert self.engine.released == [("lease", 7)]


@pytest.fixture
async def attached() -> AsyncIterator[Attached]:
    found = Attached()
    yield found
    found.running.cancel()
    await found.reports.aclose()  # type: ignore[attr-defined]


async def test_kv_of_a_request_cancelled_meanwhile_is_released(attached: Attached) -> None:
    name = await attached.submit()
    attached.commands.put_nowait(pb.Command(cancel=pb.Cancel(request_id="r")))
    await asyncio.wait_for(attached.engine.cancelled.get(), 10)
    attached.engine.prefilled(name)  # the engine had not heard of it
    await attached.until_released()


async def test_kv_that_was_reported_is_the_routers(attached: Attached) -> None:
    attached.engine.prefilled(await attached.submit())
    while not (report := await asyncio.wait_for(anext(attached.reports), 10)).deltas:
        pass
    assert report.deltas[0].kv_handle == pb.KvHandle(**HANDLE)  # type: ignore[arg-type]
    await attached.reports.aclose()  # type: ignore[attr-defined]
    assert attached.engine.released == []


async def test_kv_in_a_report_that_was_not_sent_is_released(attached: Attached) -> None:
    attached.engine.prefilled(await attached.submit())
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
    attached.engine.prefilled(name)
    await attached.until_released()
    with pytest.raises(UnavailableError, match="keep up"):
        await asyncio.wait_for(anext(attached.reports), 10)
