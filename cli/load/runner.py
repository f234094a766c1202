"""Sends a workload in a closed loop (N requests at a time) or an open one (each request at its time)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable

from cli.client.event_stream import RequestRecord
from cli.load.workload import PlannedRequest

# (request, scheduled, begin) -> record; `Client.complete`, or a test's substitute
Send = Callable[[PlannedRequest, float, float], Awaitable[RequestRecord]]
OnDone = Callable[[RequestRecord], None]


async def closed_loop(
    send: Send, requests: Iterable[PlannedRequest], concurrency: int, on_done: OnDone, stop_after_seconds: float = 0.0
) -> list[RequestRecord]:
    """Keep `concurrency` requests open until there are no more, or until the time is over (0: no limit)."""
    begin = time.perf_counter()
    queue = iter(requests)
    records: list[RequestRecord] = []

    async def one_user() -> None:
        for request in queue:
            now = time.perf_counter() - begin
            if now >= (stop_after_seconds or math.inf):
                return
            record = await send(request, now, begin)
            records.append(record)
            on_done(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_user())
    return records


async def open_loop(
    send: Send,
    requests: Iterable[PlannedRequest],
    on_done: OnDone,
    concurrency: int = 0,
    stop_after_seconds: float = 0.0,
) -> list[RequestRecord]:
    """Send each request at its time; `concurrency` limits how many are open (0: no limit)."""
    begin = time.perf_counter()
    records: list[RequestRecord] = []
    free = asyncio.Semaphore(concurrency) if concurrency else None

    async def one(request: PlannedRequest) -> None:
        try:
            record = await send(request, request.at_seconds, begin)
        finally:
            if free is not None:
                free.release()
        records.append(record)
        on_done(record)

    async with asyncio.TaskGroup() as group:
        for request in requests:
            if request.at_seconds >= (stop_after_seconds or math.inf):
                break
            await asyncio.sleep(max(0.0, begin + request.at_seconds - time.perf_counter()))
            if free is not None:
                await free.acquire()
            group.create_task(one(request))
    return records
