"""GET /, the page's files, and GET /cluster/events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import orjson
import pytest

from router.page.snapshot import COLUMNS
from tests.harness.router import cluster

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
