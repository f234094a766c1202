"""The documentation: it lists every route, and needs no network."""

from __future__ import annotations

import re

import pytest

import router.api_docs  # noqa: F401  what tests/wings.py sees: this file goes with the wing
from tests.harness.router import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_head_wherever_get_is(c: Cluster) -> None:
    description = (await c.http.get("/openapi.json")).json()
    endless = {"/cluster/events"}
    paths = [path for path, methods in description["paths"].items() if "get" in methods and path not in endless]
    assert len(paths) >= 10
    for path in (*paths, "/docs", "/openapi.json"):
        path = path.format(name="dry-run", request_id="x", response_id="x", file="main.js")
        get, head = await c.http.get(path), await c.http.head(path)
        assert head.status_code == get.status_code
        assert head.content == b""
        if path != "/metrics":
            assert head.headers["content-length"] == get.headers["content-length"]


async def test_the_documentation_needs_no_network(c: Cluster) -> None:
    page = (await c.http.get("/docs")).text
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    assert "POST /v1/chat/completions" in page
    assert "at most 16 texts" in page
    for name, field in (("Message", "tool_call_id"), ("StreamOptions", "include_usage"), ("ResponseFormat", "type")):
        assert f"<code>{field}</code>" in page.partition(f"<h2><code>{name}</code></h2>")[2].partition("<h2>")[0]
    description = (await c.http.get("/openapi.json")).json()
    body = description["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "prompt" in description["components"]["schemas"][body["$ref"].rpartition("/")[2]]["required"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', (await c.http.get("/openapi.json")).text))
    assert references <= set(description["components"]["schemas"])


async def test_an_unknown_path_is_told_of_it(c: Cluster) -> None:
    for path, told in (
        ("/none", "no such path; /docs lists all"),
        ("/v1/images", "server yet; /docs lists what is"),
    ):
        assert (await c.http.post(path, json={})).json()["error"]["message"].endswith(told)


async def test_the_description_is_true(c: Cluster) -> None:
    paths = (await c.http.get("/openapi.json")).json()["paths"]
    operations = {f"{method} {path}": entry for path, methods in paths.items() for method, entry in methods.items()}
    assert not [name for name in operations if name.startswith("head ")]
    assert all(entry["responses"].keys() == {"200", "default"} for entry in operations.values()), "no answer has 422"
    ids = [entry["operationId"] for entry in operations.values()]
    assert len(set(ids)) == len(ids)
    arguments = {each["name"]: each for each in operations["post /v1/workers/{worker_id}/drain"]["parameters"]}
    assert [each["in"] for each in arguments.values()] == ["path", "query", "query"]
    assert arguments["force"]["schema"]["default"] is False
    for name, entry in operations.items():
        if name.startswith("post ") and "requestBody" in entry:  # the handler, not FastAPI, refuses a body
            answer = await c.http.post(name.removeprefix("post "), json=1)
            assert answer.status_code == 400, name
            assert "error" in answer.json(), name


async def test_all_that_is_accepted_is_described(c: Cluster) -> None:
    description = (await c.http.get("/openapi.json")).json()
    for path, needed in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        body = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        fields = description["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
        others = {name: field for name, field in fields.items() if "without effect" in field.get("description", "")}
        assert {"store", "logits_processors"} <= set(others)
        for last in (0, -1):
            given = {name: field.get("enum", ["any"])[last] for name, field in others.items()}
            answer = await c.http.post(path, json={**needed, **given, "max_tokens": 1})
            assert answer.status_code == 200, answer.text


@pytest.mark.wing("router.embeddings_api")
async def test_paths_with_one_handler_have_one_body(c: Cluster) -> None:
    paths = (await c.http.get("/openapi.json")).json()["paths"]
    for same in (("/score", "/v1/score"), ("/rerank", "/v1/rerank", "/v2/rerank")):
        [body] = {str(paths[path]["post"]["requestBody"]) for path in same}
        assert "Body" in body
