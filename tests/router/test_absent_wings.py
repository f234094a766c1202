"""Errors of a router that needs a wing which this installation lacks, in the copy of tests/wings.py."""

from __future__ import annotations

from typing import Any

import pytest

from common.wings import has_wing
from router.server import parse_settings
from tests.harness.router import cluster

pytestmark = pytest.mark.skipif(has_wing("router.grammar"), reason="this installation has its wings")
TOOL = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"tools": [TOOL]},
        {"tool_choice": "required"},
    ],
    ids=str,
)
async def test_fields_of_wings_are_refused(field: dict[str, Any]) -> None:
    async with cluster() as c:
        answer = await c.chat(**field)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(field))
        assert "unknown field" in answer.json()["error"]["message"]


async def test_requests_are_served_without_a_log_of_them() -> None:
    async with cluster() as c:
        answer = await c.chat()
        assert answer.status_code == 200, answer.text
        assert (await c.http.get(f"/explain/{answer.json()['id']}")).status_code == 404
        assert (await c.http.get("/v1/cluster")).status_code == 404


@pytest.mark.parametrize("flag", ["--ttft-objective-ms=100", "--max-connections=10"])
def test_flags_of_wings_are_not_known(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--decode=127.0.0.1:1", flag])
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/v1/rerank"])
async def test_routes_of_wings_are_not_known(path: str) -> None:
    async with cluster() as c:
        answer = await c.http.post(path, json={"input": "a"})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "no such path"
