"""Fields of other servers' requests that ask for nothing are taken; test_request_fields.py has the others."""

from __future__ import annotations

import pytest

from tests.harness.router import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOOLS = [{"type": "function", "function": {"name": "f"}}]


async def test_harmless_fields_of_common_clients_are_accepted(c: Cluster) -> None:
    answer = await c.chat(
        metadata={"a": "b"}, store=False, user="u", service_tier="auto", tool_choice="none", tools=[],
        parallel_tool_calls=True, response_format={"type": "text"}, suffix=None, modalities=["text"],
    )  # fmt: skip
    assert answer.status_code == 200
    answer = await c.chat(
        use_beam_search=False, length_penalty=1.0, spaces_between_special_tokens=True, prompt_logprobs=None,
        stream=True, stream_options={"include_obfuscation": False},
    )  # fmt: skip
    assert answer.status_code == 200
    assert (await c.chat(tools=TOOLS, tool_choice="none", reasoning_effort="none")).status_code == 200
    assert (await c.chat(reasoning_effort="high", verbosity="low")).status_code == 200
    answer = await c.chat(
        echo=False, best_of=1, add_special_tokens=False, top_logprobs=0, prompt_embeds=None, request_id=None,
        vllm_xargs={}, return_tokens_as_token_ids=False, moderation=None,
    )  # fmt: skip
    assert answer.status_code == 200
    answer = await c.complete(tools=[], tool_choice="auto", parallel_tool_calls=False)
    assert answer.status_code == 200
