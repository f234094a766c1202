"""docs/request_fields.md is true: each field is sent and has the effect that the page names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.router import cluster

pytestmark = [pytest.mark.wing("router.embeddings_api"), pytest.mark.wing("router.responses_api")]
NEEDED: dict[str, Any] = {
    "chat": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "completions": {"prompt": "Hello", "max_tokens": 2},
    "embeddings": {"input": "Hello"},
    "rerank": {"query": "Hello", "documents": ["a", "b"]},
    "responses": {"input": "Hello", "max_output_tokens": 2},
    "score": {"text_1": "Hello", "text_2": "a"},
}
NO_TEXT = {"embeddings", "rerank", "score"}
VALUES: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "stream_options": {}}  # of what is checked


def test_the_page_is_generated() -> None:
    from tests.request_fields import page

    assert page() == Path("docs/request_fields.md").read_text(encoding="utf-8"), "run python -m tests.request_fields"


async def test_what_has_no_effect_or_is_refused() -> None:
    from tests.request_fields import BODIES, IGNORED, PATHS, REFUSED, WORKS, fields_of, verdict

    async with cluster() as c:
        for api in BODIES:
            for name in sorted(fields_of(api)):
                told = verdict(api, name)
                if told == WORKS:
                    continue
                answer = await c.http.post(f"/v1/{PATHS[api]}", json={**NEEDED[api], name: VALUES.get(name, "zz")})
                if told == IGNORED and api not in NO_TEXT:  # scripted workers have no vectors
                    assert answer.status_code == 200, (api, name, answer.text)
                    assert answer.headers["x-mini-infer-ignored"] == name
                elif told != IGNORED:
                    error = answer.json()["error"]
                    code = "unsupported_parameter" if told == REFUSED else "unknown_parameter"
                    assert (answer.status_code, error["param"], error["code"]) == (400, name, code), (api, name)
