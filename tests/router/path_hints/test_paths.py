"""Unknown paths: the error names the one that was probably meant."""

from __future__ import annotations

import pytest

from tests.harness.router import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
