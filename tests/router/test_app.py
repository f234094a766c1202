"""Paths and methods, and the API key."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.harness.router import Cluster, cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def c() -> AsyncIterator[Cluster]:
    async with cluster() as made:
        yield made


async def test_another_method_is_told_which_one_it_is(c: Cluster) -> None:
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("OPTIONS", "/livez", {"GET", "HEAD"}),
    ):
        answer = await c.http.request(method, path)
        assert answer.status_code == 405
        assert set(re.split(", *", answer.headers["allow"])) == allowed
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_api_key_guards_every_route_but_health() -> None:
    async with cluster(api_key="sesame") as c:
        for path in ("/health", "/readyz", "/livez"):
            assert (await c.http.get(path)).status_code == 200
        paths = (
            "/v1/models",
            "/metrics",
            "/v1/cluster",
            "/explain/x",
            "/version",
            "/docs",
            "/openapi.json",
            "/nothing",
        )
        for path in (*paths, "/health/../v1/models", "/%68ealth", "/v1/models?x=/health"):
            answer = await c.http.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for value in ("Bearer wrong", "Bearer", "sesame", "Basic sesame", "Bearer sesamee"):
            assert (await c.http.get("/v1/models", headers={"authorization": value})).status_code == 401
        assert (await c.chat()).status_code == 401
        good = {"authorization": "Bearer sesame"}
        assert (await c.http.get("/v1/models", headers=good)).status_code == 200
