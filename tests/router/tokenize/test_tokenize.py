"""POST /tokenize and /detokenize: by the model, with a template's variables, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from common.token_ids import unpack_ids
from tests.common.tools.tool_templates import HERMES_TEMPLATE
from tests.harness.router import Cluster, replying

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def test_ids_of_texts_and_conversations_and_back(c: Cluster) -> None:
    tokens = (await c.http.post("/tokenize", json={"prompt": "héllo"})).json()
    assert tokens == {"count": 6, "max_model_len": tokens["max_model_len"], "tokens": list("héllo".encode())}
    text = (await c.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "héllo"}
    chat = (await c.http.post("/tokenize", json={"messages": MESSAGES, "return_token_strs": True})).json()
    assert chat["count"] == len(chat["token_strs"]) == 8
    assert (await c.http.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    other = await c.http.post("/tokenize", json={"prompt": "x", "model": "other"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.wing("router.tools")
async def test_the_ids_of_a_conversation_with_tools_are_those_of_its_prompt() -> None:
    async with replying("Hi.", template=HERMES_TEMPLATE) as c:
        fields = {"messages": MESSAGES, "tools": TOOLS}
        found = (await c.http.post("/tokenize", json=fields)).json()["tokens"]
        assert b'"name": "weather"' in bytes(token for token in found if token < 256)
        await c.http.post("/v1/chat/completions", json=fields)
        assert found == unpack_ids(c.decode[0].submits[0].prompt_token_ids)
        refused = (
            await c.http.post("/tokenize", json={"messages": MESSAGES, "tools": [{"type": "function"}]})
        ).json()
        assert refused["error"]["param"] == "tools.0.function"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "x", "tools": TOOLS},
        {"tokens": [-1]},
        {"tokens": [320]},
        {"tokens": ["1"]},
        {"tokens": 5},
        {"prompt": 5},
        {"messages": [5]},
    ],
    ids=str,
)
async def test_what_is_refused(c: Cluster, path: str, fields: dict[str, Any]) -> None:
    assert (await c.http.post(path, json=fields)).status_code == 400
