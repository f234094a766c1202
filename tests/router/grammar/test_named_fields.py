"""Errors that workers find in a grammar while they answer name the field that asked for it."""

from __future__ import annotations

from typing import Any

import pytest

from protos import types_pb2 as pb
from tests.common.tools.tool_templates import HERMES_TEMPLATE
from tests.harness.router import replying

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/completions", {"prompt": "?", "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ("/v1/responses", {"input": "?", "text": {"format": {"type": "json_object"}}}, "text.format"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format",
        ),
    ],
)
async def test_an_error_of_a_worker_names_the_field_that_the_client_sent(
    path: str, fields: dict[str, Any], named: str
) -> None:
    """A grammar may turn out to be too complex only while the answer is generated."""
    refusal: dict[str, Any] = {"refuse": pb.FAILURE_CODE_INVALID_ARGUMENT, "refuse_param": "structured_outputs"}
    messages = {} if "input" in fields or "prompt" in fields else {"messages": [{"role": "user", "content": "?"}]}
    limit = "max_output_tokens" if "input" in fields else "max_tokens"
    async with replying("", template=HERMES_TEMPLATE, **refusal) as c:
        answer = await c.http.post(path, json={"model": "dry-run", limit: 8, **messages, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (named in error["message"]) if path == "/v1/messages" else (error["param"] == named)
