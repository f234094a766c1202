"""Paths and methods, their documentation, and pages of other origins."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from router.config import HttpConfig
from tests.router.harness import Cluster, cluster

ORIGIN = "https://chat.example.org"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def c() -> AsyncIterator[Cluster]:
    async with cluster(http=HttpConfig(cors_origins=f"{ORIGIN},http://localhost:3000")) as made:
        yield made


@pytest.mark.asyncio(loop_scope="module")
async def test_head_wherever_get_is(c: Cluster) -> None:
    description = (await c.http.get("/openapi.json")).json()
    paths = [path for path, methods in description["paths"].items() if "get" in methods]
    assert len(paths) >= 10
    for path in (*paths, "/docs", "/openapi.json"):
        path = path.format(name="dry-run", request_id="x")
        get, head = await c.http.get(path), await c.http.head(path)
        assert head.status_code == get.status_code
        assert head.content == b""
        if path != "/metrics":
            assert head.headers["content-length"] == get.headers["content-length"]


@pytest.mark.asyncio(loop_scope="module")
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


@pytest.mark.asyncio(loop_scope="module")
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


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/", "no such path; /docs lists all"),
        ("/wp-login.php", "no such path; /docs lists all"),
        ("/" + "x" * 20_000, "no such path"),
        ("/v1/responses", "/v1/responses is not supported by this server yet; /docs lists what is"),
        ("/v1/messages/count_tokens", "/v1/messages/count_tokens is not supported by this server yet; /docs lists"),
        ("/v1/embeddings", "/v1/embeddings is not supported by this server yet; /docs lists what is"),
    ],
)
async def test_another_path_is_not_said_to_be_misspelt(c: Cluster, path: str, told: str) -> None:
    answer = await c.http.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(told)


def documents(page: str, name: str, field: str) -> bool:
    return f"<code>{field}</code>" in page.partition(f"<h2><code>{name}</code></h2>")[2].partition("<h2>")[0]


@pytest.mark.wing("router.grammar")
@pytest.mark.asyncio(loop_scope="module")
async def test_the_documentation_has_schemas_of_wings(c: Cluster) -> None:
    assert documents((await c.http.get("/docs")).text, "ResponseFormat", "type")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_documentation_needs_no_network(c: Cluster) -> None:
    page = (await c.http.get("/docs")).text
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    assert "POST /v1/chat/completions" in page
    assert "at most 4 texts" in page
    for name, field in (("Message", "tool_call_id"), ("StreamOptions", "include_usage")):
        assert documents(page, name, field)
    description = (await c.http.get("/openapi.json")).json()
    body = description["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "prompt" in description["components"]["schemas"][body["$ref"].rpartition("/")[2]]["required"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', (await c.http.get("/openapi.json")).text))
    assert references <= set(description["components"]["schemas"])


@pytest.mark.asyncio(loop_scope="module")
async def test_pages_of_listed_origins_may_ask(c: Cluster) -> None:
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    before = await c.http.options("/v1/chat/completions", headers={"origin": ORIGIN, **asking})
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in before.headers["access-control-allow-headers"]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for fields in ({}, {"stream": True}, {"max_tokens": 0}):
        answer = await c.http.post("/v1/chat/completions", json={**body, **fields}, headers={"origin": ORIGIN})
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "retry-after" in answer.headers["access-control-expose-headers"]
    other = {"origin": "https://evil.example.org"}
    assert (await c.http.options("/v1/models", headers={**other, **asking})).status_code == 400
    assert "access-control-allow-origin" not in (await c.http.get("/v1/models", headers=other)).headers


async def test_no_page_may_ask_unless_allowed_and_a_key_stays_a_key() -> None:
    async with cluster() as c:
        answer = await c.http.get("/v1/models", headers={"origin": ORIGIN})
        assert not [name for name in answer.headers if name.startswith("access-control")]
    async with cluster(http=HttpConfig(cors_origins="*"), api_key="sesame") as c:
        answer = await c.http.get("/v1/models", headers={"origin": ORIGIN})
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "*"
