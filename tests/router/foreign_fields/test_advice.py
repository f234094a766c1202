"""Fields of other servers without effect are accepted; a header of the answer names ignored advice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.router import DRY_RUN, Cluster, cluster

READING = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'low' %}{% endif %}{{ reasoning_effort }}"
)
THINKS = "{# <think> </think> #}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("template", "fields", "named"),
    [
        ("", {"reasoning_effort": "low", "verbosity": "high"}, "reasoning_effort, verbosity"),
        (READING, {"reasoning_effort": "low", "verbosity": None}, None),
        ("{{ verbosity }}", {"verbosity": "low", "metadata": {"a": "b"}}, "metadata"),
        (
            "{{ enable_thinking }}",
            {"chat_template_kwargs": {"enable_thinking": True, "x": 1, "a\r\nb": 1}},
            "chat_template_kwargs, chat_template_kwargs.x",
        ),
        ("", {"chat_template_kwargs": {f"x{number}": 1 for number in range(16)}, "verbosity": "low"}, "..."),
        ("", {}, None),
    ],
)
async def test_the_answer_names_advice_that_is_not_heeded(
    template: str, fields: dict[str, Any], named: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    async with cluster(tokenizer=DRY_RUN.with_templates({"default": f"{template}Hi"})) as c:
        for stream in (False, True):
            answer = await c.http.post("/v1/chat/completions", json={**body, **fields, "stream": stream})
            assert answer.status_code == 200
            ignored = answer.headers.get("x-mini-infer-ignored")
            assert ignored == named if named != "..." else ignored.endswith("x8, ...")


@pytest.mark.wing("router.reasoning")
@pytest.mark.parametrize(
    ("template", "fields", "named"),
    [
        (THINKS, {"reasoning_effort": "none"}, "reasoning_effort"),  # its markers are no tokens: nothing ends it
        (THINKS + "{{ enable_thinking }}", {"reasoning_effort": "none"}, None),
        ("", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("", {"reasoning": {"enabled": False}}, "reasoning.enabled"),
        (READING, {"reasoning": {"effort": "low"}}, None),
    ],
)
async def test_so_it_does_with_efforts(template: str, fields: dict[str, Any], named: str | None) -> None:
    await test_the_answer_names_advice_that_is_not_heeded(template, fields, named)


@pytest.mark.asyncio(loop_scope="module")
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
