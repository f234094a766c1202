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


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions/", "/v1/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/models", "/v1/models"),
    ],
)
async def test_an_unknown_path_names_the_one_that_was_meant(c: Cluster, path: str, meant: str) -> None:
    answer = await c.http.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"no such path; did you mean {meant}?"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/wp-login.php", "no such path"),
        ("/" + "x" * 20_000, "no such path"),
        ("/v1/moderations", "/v1/moderations is not supported by this server yet"),
    ],
)
async def test_another_path_is_not_said_to_be_misspelt(c: Cluster, path: str, told: str) -> None:
    answer = await c.http.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].partition("; /docs")[0] == told


async def test_api_key_guards_every_route_but_health() -> None:
    async with cluster(api_key="sesame") as c:
        for path in ("/healthz", "/health", "/readyz", "/livez"):
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
        for path in (*paths, "/healthz/../v1/models", "/%68ealthz", "/v1/models?x=/healthz"):
            answer = await c.http.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for value in ("Bearer wrong", "Bearer", "sesame", "Basic sesame", "Bearer sesamee"):
            assert (await c.http.get("/v1/models", headers={"authorization": value})).status_code == 401
        assert (await c.chat()).status_code == 401
        good = {"authorization": "Bearer sesame"}
        assert (await c.http.get("/v1/models", headers=good)).status_code == 200
