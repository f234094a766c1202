"""Reasoning through the official client, against workers with scripted replies."""

from __future__ import annotations

from typing import Any

import pytest

from common.grammar.grammar import for_llguidance
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from common.text.tokenizer import Tokenizer
from common.token_ids import unpack_ids
from tests.common.tools.tool_templates import HERMES_TEMPLATE, call_text
from tests.harness.router import DRY_RUN, Cluster, cluster, replying
from tests.harness.scripted_worker import Script

TEMPLATE = (
    HERMES_TEMPLATE
    + r"""{%- for message in messages if message.reasoning_content %}
    {{- "[reasoned]" + message.reasoning_content }}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
    {{- '<think>\n\n</think>\n\n' }}
{%- elif add_generation_prompt and reasoning_effort is defined %}
    {{- '<think>\n' }}
{%- endif %}
"""
)
TOOLS: Any = [{"type": "function", "function": {"name": "get_time"}}]
REPLY = "<think>\nÉ. 2 < 3.\n</think>\n\nYes."
CALL = call_text("get_time", "{}")
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


HARMONY = "{{ tools }}<|start|>assistant<|channel|>commentary to=functions.x <|message|>"


async def ask(c: Cluster, messages: Any = ({"role": "user", "content": "Hello"},), **fields: Any) -> Any:
    return await c.openai.chat.completions.create(model="dry-run", messages=messages, max_tokens=400, **fields)


async def streamed(c: Cluster, **fields: Any) -> dict[str, Any]:
    """Return what a client adds up for one choice."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": "", "order": []}
    async for chunk in await ask(c, stream=True, **fields):
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_unset=True)
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for name in ("reasoning", "content"):
                found[name] += delta.get(name) or ""
                found["order"] += [name] if delta.get(name) and name not in found["order"] else []
            for call in delta.get("tool_calls") or ():
                found["calls"] += call["function"]["arguments"]
            found["finish_reason"] = choice.finish_reason
    return found


@pytest.mark.parametrize("tokens_per_step", [1, 1000])
async def test_reasoning_is_a_field_of_its_own(tokens_per_step: int) -> None:
    async with replying(REPLY, tokens_per_step, TEMPLATE) as c:
        answer = await ask(c)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.reasoning) == ("É. 2 < 3.", "É. 2 < 3.")
        assert (message.content, answer.choices[0].finish_reason) == ("Yes.", "stop")
        details = answer.usage.completion_tokens_details
        assert details.reasoning_tokens == 6  # those that show text, however many come at once
        found = await streamed(c)
        assert (found["reasoning"], found["content"], found["finish_reason"]) == ("É. 2 < 3.", "Yes.", "stop")
        assert found["order"] == ["reasoning", "content"]


@pytest.mark.parametrize("extra", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}], ids=str)
async def test_reasoning_that_is_not_wanted_is_left_out(extra: dict[str, Any]) -> None:
    async with replying(REPLY, template=TEMPLATE) as c:
        message = (await ask(c, extra_body=extra)).choices[0].message
        assert message.content == "Yes."
        assert "reasoning" not in message.model_fields_set
        found = await streamed(c, extra_body=extra)
        assert (found["reasoning"], found["content"]) == ("", "Yes.")


async def test_without_thinking_a_marker_is_text() -> None:
    async with replying("<think> is a marker.", template=TEMPLATE) as c:
        extra = {"chat_template_kwargs": {"enable_thinking": False}}
        message = (await ask(c, extra_body=extra)).choices[0].message
        assert (message.reasoning, message.content) == (None, "<think> is a marker.")


async def test_calls_are_taken_from_the_answer_and_not_from_the_reasoning() -> None:
    async with replying(f"<think>\n{CALL}?\n</think>\n\n{CALL}", template=TEMPLATE) as c:
        [choice] = (await ask(c, tools=TOOLS)).choices
        assert choice.message.reasoning == f"{CALL}?"
        assert [call.function.name for call in choice.message.tool_calls] == ["get_time"]
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        found = await streamed(c, tools=TOOLS)
        assert (found["reasoning"], found["calls"], found["content"]) == (f"{CALL}?", "{}", "")


async def test_channels_are_reasoning_calls_and_content() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    call = "<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}<|call|>"
    async with replying(text + call, template=HARMONY) as c:
        [choice] = (await ask(c, tools=TOOLS)).choices
        message = choice.message
        assert (message.reasoning, message.content, choice.finish_reason) == ("Hm.", "I look.", "tool_calls")
        assert [(each.function.name, each.function.arguments) for each in message.tool_calls] == [("get_time", "{}")]
        found = await streamed(c, tools=TOOLS)
        assert (found["reasoning"], found["content"], found["calls"]) == ("Hm.", "I look.", "{}")
        [choice] = (await ask(c, tools=TOOLS, tool_choice="required")).choices
        assert choice.message.reasoning == "Hm."
        assert [call.function.name for call in choice.message.tool_calls] == ["get_time"]
        followed = c.decode[0].submits[-1].sampling.grammar
        assert "analysis" in followed
        assert "final" not in followed
        assert "to=functions.get_time <|constrain|>json" in followed
        strict = [{**TOOLS[0], "function": {"name": "get_time", "strict": True}}]
        await ask(c, tools=strict)
        assert not c.decode[0].submits[-1].sampling.grammar  # advice


async def test_strict_calls_of_channels_that_special_tokens_begin() -> None:
    backend = load_tokenizer(resolve_model("dry-run"))._backend
    markers = ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"]
    backend.add_special_tokens(markers)
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = " to=functions.get_time<|channel|>commentary <|constrain|>json<|message|>{}"
    tokenizer = Tokenizer(
        backend, bos_id=256, eos_token_ids=[257], templates={"default": HARMONY}, vocab_size=DRY_RUN.vocab_size
    )
    strict = [{**TOOLS[0], "function": {"name": "get_time", "strict": True}}]
    for reply in (text + call, call):
        script = Script(reply=backend.encode(reply, add_special_tokens=False).ids)
        async with cluster(script=script, tokenizer=tokenizer, info={"max_model_len": 4096}) as c:
            [choice] = (await ask(c, tools=strict)).choices
            assert choice.message.reasoning == ("Hm." if reply is not call else None)
            assert choice.message.content is None
            assert [(each.function.name, each.function.arguments) for each in choice.message.tool_calls] == [
                ("get_time", "{}")
            ]
            followed = c.decode[0].submits[-1].sampling.grammar
            assert "(call | final)" in followed
            assert "analysis" in followed


async def test_completions_show_the_text_as_it_is() -> None:
    async with replying(REPLY, template=TEMPLATE) as c:
        answer = await c.openai.completions.create(model="dry-run", prompt="Hello", max_tokens=400)
        assert answer.choices[0].text == REPLY


@pytest.mark.parametrize(
    ("fields", "begin"),
    [
        ({}, "before: (begin reasoning BLANKS)?"),
        ({"reasoning_effort": "low"}, "before: reasoning BLANKS"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, None),
    ],
    ids=["may reason", "begun by the prompt", "turned off"],
)
async def test_a_schema_holds_after_the_reasoning(fields: dict[str, Any], begin: str | None) -> None:
    async with replying("{}", template=TEMPLATE) as c:
        await ask(c, response_format=SCHEMA, **fields)
        followed = c.decode[0].submits[0].sampling.grammar
        assert followed.startswith("json_schema:" if begin is None else "after:")
        if begin is not None:
            assert begin in for_llguidance(followed)


async def test_reasoning_that_comes_back_reaches_the_template() -> None:
    sent = {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}
    async with replying("Yes.", template=TEMPLATE) as c:
        await ask(c, [{"role": "user", "content": "?"}, sent, {"role": "user", "content": "??"}])
        prompt = unpack_ids(c.decode[0].submits[0].prompt_token_ids)
        assert bytes(prompt).endswith(b"[assistant][reasoned]Hm.")


# What gpt-oss's template reads of tools and answers, and what it refuses.
GPT_OSS = r"""
{%- for tool in tools %}{{- "// " + tool.function.description + "\ntype " + tool.function.name }}{%- endfor %}
{%- for message in messages %}
    {%- if "tool_calls" in message %}
        {%- if message.content and message.thinking %}{{- raise_exception("Cannot pass both content and thinking") }}
        {%- elif message.content or message.thinking %}
            {{- "<|channel|>analysis<|message|>" + (message.content or message.thinking) + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant to=functions." + message.tool_calls[0].function.name + "<|channel|>commentary" }}
    {%- endif %}
{%- endfor %}
"""


@pytest.mark.parametrize(("content", "shown"), [(None, "Hm."), ("I look.", "I look.")])
async def test_reasoning_before_a_call_reaches_gpt_oss(content: str | None, shown: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    sent = {"role": "assistant", "content": content, "reasoning": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "noon"}
    async with replying("Yes.", template=GPT_OSS) as c:
        await ask(c, [{"role": "user", "content": "?"}, sent, result], tools=TOOLS)
        prompt = bytes(unpack_ids(c.decode[0].submits[0].prompt_token_ids)).decode()
        assert prompt.startswith(f"// \ntype get_time<|channel|>analysis<|message|>{shown}<|end|>")
