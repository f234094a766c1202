"""Who makes snapshots, and when a stream of them ends."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from router.page import feed as feed_module
from router.page import snapshot
from router.page.feed import Feed
from tests.harness.router import cluster


class Writer:
    keeps_alive = True


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times of which snapshots were made."""
    times: list[float] = []
    figures = snapshot.figures

    def counted(gateway: Any, before: Any, now: float) -> Any:
        times.append(now)
        return figures(gateway, before, now)

    monkeypatch.setattr(feed_module, "figures", counted)
    return times


async def test_all_who_watch_share_the_snapshot_of_a_second(snapshots: list[float]) -> None:
    async with cluster() as c, AsyncExitStack() as stack:
        feed = Feed(c.gateway)
        writer: Any = Writer()
        watchers = [await stack.enter_async_context(aclosing(feed.events(writer))) for _ in range(5)]
        for _ in range(2):
            events = await asyncio.gather(*(anext(watcher) for watcher in watchers))
            assert len(set(events)) <= 2  # the second may change between two of them
        assert len({int(time) for time in snapshots}) == len(snapshots) <= 4


async def test_nobody_watches_nothing_is_made(snapshots: list[float]) -> None:
    async with cluster() as c:
        feed = Feed(c.gateway)
        writer: Any = Writer()
        async with aclosing(feed.events(writer)) as events:
            await anext(events)
        assert writer.keeps_alive
        num_made = len(snapshots)
        await asyncio.sleep(1.2)
        assert len(snapshots) == num_made == 1


async def test_a_stream_ends_with_the_server() -> None:
    async with cluster() as c:
        writer: Any = Writer()
        async with asyncio.timeout(30), aclosing(Feed(c.gateway).events(writer)) as events:
            await anext(events)
            writer.keeps_alive = False
            assert [event async for event in events] == []
