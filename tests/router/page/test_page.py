"""The page's routes and figures: the maker of snapshots, their contents, and the end of a stream of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import httpx
import orjson
import pytest

from protos import types_pb2 as pb
from router.costs.meter import meter_of
from router.page import feed as feed_module
from router.page import snapshot
from router.page.feed import Feed
from router.page.snapshot import COLUMNS, Before, figures, worker_facts, worker_figures
from router.workers.worker_link import WorkerLink
from tests.harness.router import cluster


class Writer:
    keeps_alive = True


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the times at which snapshots were made."""
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


def shown(link: WorkerLink, now: float, **rates: float) -> dict[str, Any]:
    found = worker_figures(link, now, rates.get("decode", 0.0), rates.get("prefill", 0.0))
    return dict(zip(COLUMNS, found, strict=True))


def test_a_worker_that_is_not_there_yet() -> None:
    link = WorkerLink("decode", "10.0.0.7:9000")
    facts = worker_facts(link, "a-model")
    assert (facts["id"], facts["host"], facts["role"]) == ("10.0.0.7:9000", "10.0.0.7", "decode")
    assert shown(link, 0.0)["state"] == "connecting"


def test_figures_are_those_of_the_last_report() -> None:
    link = WorkerLink("decode", "10.0.0.7:9000")
    load = pb.LoadReport(
        num_running=3, num_waiting=2, num_swapped=1, num_leases=4, kv_blocks_total=100, kv_blocks_free=30,
        kv_blocks_cached=20, num_steps=7, step_seconds=0.0125, step_decode_tokens=3,
    )  # fmt: skip
    link.apply(pb.StepReport(load=load))
    now = shown(link, link.last_step, decode=240.04)
    assert (now["running"], now["waiting"], now["leases"]) == (3, 3, 4)
    assert (now["blocks"], now["free"], now["cached"]) == (100, 30, 20)
    assert (now["step_ms"], now["decode_rate"]) == (12.5, 240.0)
    assert shown(link, link.last_step + 10.0)["step_ms"] == 0  # of a step long ago


async def test_rates_are_tokens_between_two_snapshots() -> None:
    async with cluster(num_decode=1) as c:
        [link] = c.gateway.workers.links
        start = time.monotonic()
        first, before = figures(c.gateway, Before(), start)
        assert dict(zip(COLUMNS, first["workers"][0], strict=True))["decode_rate"] == 0
        meter_of(link).rates.num_decoded += 50
        second, before = figures(c.gateway, before, start + 0.5)
        assert dict(zip(COLUMNS, second["workers"][0], strict=True))["decode_rate"] == pytest.approx(100.0)
        meter_of(link).rates.num_decoded = 3  # the worker is another one
        third, _ = figures(c.gateway, before, start + 1.5)
        assert dict(zip(COLUMNS, third["workers"][0], strict=True))["decode_rate"] == 0


KEY = {"authorization": "Bearer a-key"}


async def watch(http: httpx.AsyncClient, **headers: str) -> AsyncGenerator[tuple[str, Any]]:
    async with http.stream("GET", "/cluster/events", headers=headers) as response:
        assert response.status_code == 200
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line:
                yield name, orjson.loads(line.removeprefix("data: "))


async def test_the_page_needs_no_key_and_what_it_asks_for_does() -> None:
    async with cluster(api_key="a-key") as c:
        page = await c.http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        assert (await c.http.get("/page/main.js")).headers["content-type"].startswith("text/javascript")
        assert (await c.http.get("/page/nothing.js", headers=KEY)).status_code == 404
        for path in ("/cluster/events", "/page/nothing.js", "/page/..%2froutes.py"):
            assert (await c.http.get(path)).status_code == 401


async def test_a_file_that_a_browser_has_is_not_sent_again() -> None:
    async with cluster() as c:
        page = await c.http.get("/")
        again = await c.http.get("/", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_events_are_facts_and_then_figures() -> None:
    async with cluster(num_prefill=1, num_decode=1, local_prefill_tokens=0) as c:
        assert (await c.http.head("/cluster/events")).status_code == 200
        answer = (await c.chat()).json()
        async with aclosing(watch(c.http)) as events:
            name, facts = await anext(events)
            assert name == "facts"
            assert [worker["id"] for worker in facts["workers"]] == ["p0", "d0"]
            name, now = await anext(events)
            assert name == "now"
            assert [len(row) for row in now["workers"]] == [len(COLUMNS)] * 2
            [request] = now["requests"]
            assert request["id"].startswith(answer["id"])
            assert sum(seconds for _, _, seconds in request["spans"]) == pytest.approx(request["total"], abs=1e-4)
            name, _ = await anext(events)  # facts have not changed
            assert name == "now"
            await c.decode[0].kill()
            async with asyncio.timeout(30):
                while name != "facts":
                    name, facts = await anext(events)
            assert [worker.get("device") for worker in facts["workers"]] == ["cpu", None]
