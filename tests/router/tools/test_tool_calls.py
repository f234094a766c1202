"""Tool calls through the official client, against workers with scripted replies."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from tokenizers import Tokenizer as Backend

from common.text.tokenizer import Tokenizer
from tests.common.tools.tool_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE, call_text
from tests.harness.router import DRY_RUN, Cluster, Script, cluster, replying

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Now.", "parameters": PARAMETERS},
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS: Any = [WEATHER, TIME]
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
ARGUMENTS = '{"city": "Malmö 🌧"}'
ONE = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


async def ask(c: Cluster, **fields: Any) -> Any:
    fields = {"tools": TOOLS, "messages": MESSAGES, "max_tokens": 500, **fields}
    return await c.openai.chat.completions.create(model="dry-run", **fields)


async def streamed(c: Cluster, **fields: Any) -> dict[int, dict[str, Any]]:
    """Return content, calls and finish reason of each choice, as a client adds them up."""
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in await ask(c, stream=True, **fields):
        for choice in chunk.choices:
            into = choices.setdefault(choice.index, {"content": None, "calls": [], "finish_reason": None})
            if choice.delta.content is not None:
                into["content"] = (into["content"] or "") + choice.delta.content
            for call in choice.delta.tool_calls or ():
                arguments = call.function.arguments
                if call.id:
                    assert (call.index, call.type) == (len(into["calls"]), "function")
                    into["calls"].append((call.id, call.function.name, arguments))
                else:
                    assert (call.index, call.type, call.function.name) == (len(into["calls"]) - 1, None, None)
                    into["calls"][-1] = (*into["calls"][-1][:2], into["calls"][-1][2] + arguments)
            assert into["finish_reason"] is None
            if choice.finish_reason:
                assert choice.delta.model_dump(exclude_unset=True) == {}  # a chunk of its own
                into["finish_reason"] = choice.finish_reason
    return choices


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


@pytest.mark.parametrize("tokens_per_step", [1, 1000])
@pytest.mark.parametrize(
    ("reply", "content", "calls", "reason"),
    [
        (ONE, None, [("get_weather", ARGUMENTS)], "tool_calls"),
        (f"{ONE}\n{TWO}", None, [("get_weather", ARGUMENTS), ("get_time", "{}")], "tool_calls"),
        (f"I look: é\n{TWO}", "I look: é", [("get_time", "{}")], "tool_calls"),
        ("No <tool> needed.", "No <tool> needed.", [], "stop"),
        ("<tool_call>\n{garbage}\n</tool_call>", "<tool_call>\n{garbage}\n</tool_call>", [], "stop"),
        (ONE[:30], ONE[:30], [], "stop"),
        (ONE[:60], None, [("get_weather", '{"city": "M')], "tool_calls"),
    ],
    ids=["one", "two", "after text", "text", "garbage", "cut name", "cut arguments"],
)
async def test_calls(
    reply: str, content: str | None, calls: list[tuple[str, str]], reason: str, tokens_per_step: int
) -> None:
    async with replying(reply, tokens_per_step=tokens_per_step, template=HERMES_TEMPLATE) as c:
        [choice] = (await ask(c)).choices
        assert choice.message.content == content
        assert calls_of(choice) == calls
        assert choice.finish_reason == reason
        [shown] = (await streamed(c)).values()
        assert shown["content"] == content
        assert [call[1:] for call in shown["calls"]] == calls
        assert shown["finish_reason"] == reason
        ids = [call.id for call in choice.message.tool_calls or ()] + [call[0] for call in shown["calls"]]
        assert len(set(ids)) == len(ids) == 2 * len(calls)
        assert not c.decode[0].submits[0].sampling.grammar


@pytest.mark.parametrize("no_arguments", ["{}", "", " "])
async def test_tools_reach_the_template_and_results_come_back(no_arguments: str) -> None:
    async with replying(TWO, template=HERMES_TEMPLATE) as c:
        first = await ask(c, tools=[STRICT, TIME], extra_body={"return_token_ids": True})
        prompt = bytes(first.prompt_token_ids).decode()
        assert f"<tools>{json.dumps(WEATHER)}" in prompt
        assert '"strict"' not in prompt
        message = first.choices[0].message
        message.tool_calls[0].function.arguments = no_arguments
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"}
        again = [*MESSAGES, message.model_dump(exclude_none=True), result]
        second = await ask(c, messages=again, extra_body={"return_token_ids": True})
        prompt = bytes(second.prompt_token_ids).decode()
        assert prompt.endswith(f"[user]Hello[assistant]\n{TWO}[tool]noon[assistant]")


async def test_where_a_template_takes_one_call_an_answer_has_one() -> None:
    shown = (
        "{% for m in messages if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}[call]{% endfor %}"
    )
    call = '{"name": "get_time", "parameters": {}}'
    async with replying(f"{call}; {call}", template=LLAMA3_TEMPLATE + shown) as c:
        for fields in ({}, {"tool_choice": "required"}):
            message = (await ask(c, **fields)).choices[0].message
            assert [each.function.name for each in message.tool_calls] == ["get_time"]
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"}
            await ask(c, messages=[*MESSAGES, message.model_dump(exclude_none=True), result])
    async with replying(f"{call}; {call}", template=LLAMA3_TEMPLATE) as c:
        assert len((await ask(c)).choices[0].message.tool_calls) == 2


@pytest.mark.parametrize("city", ["Malmö", "<eos>"])
async def test_arguments_that_a_template_joins_to_texts_are_json(city: str) -> None:
    """DeepSeek-V3's does, unlike others, which write an object themselves."""
    template = (
        "{{ tools }}{% for m in messages %}{% for call in m.tool_calls or () %}{{ '<｜tool▁call▁begin｜>' + "
        "call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}{% endfor %}{% endfor %}"
    )
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    said: Any = {"role": "assistant", "tool_calls": [call]}
    result: Any = {"role": "tool", "tool_call_id": "1", "content": "Rain."}
    async with replying("ok", template=template) as c:
        answer = await ask(c, messages=[*MESSAGES, said, result], extra_body={"return_token_ids": True})
        prompt = bytes(answer.prompt_token_ids).decode()
        assert prompt.endswith(f"<｜tool▁call▁begin｜>get_weather\n```json\n{arguments}\n```")


MISTRAL_TEMPLATE = """{{ tools }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or () %}
{%- if call.id | length != 9 %}{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}[TOOL_CALLS]{{ call | tojson }}{% endfor %}{% endfor %}"""
KIMI_TEMPLATE = """{{ tools }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or () -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}{% endfor %}"""


async def test_ids_of_calls_are_those_that_mistrals_templates_take() -> None:
    async with replying('[TOOL_CALLS][{"name": "get_time", "arguments": {}}]', template=MISTRAL_TEMPLATE) as c:
        message = (await ask(c)).choices[0].message
        assert message.tool_calls[0].id.isalnum()
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"}
        again = await ask(c, messages=[*MESSAGES, message.model_dump(exclude_none=True), result])
        assert again.choices[0].message.tool_calls[0].id != message.tool_calls[0].id


async def test_ids_of_kimis_calls_have_name_and_number() -> None:
    """Its template writes them into the prompt, as the model is trained on them."""
    backend = Backend.from_str(DRY_RUN._backend.to_str())
    backend.add_special_tokens(["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"])
    templates = {"default": KIMI_TEMPLATE}
    tokenizer = Tokenizer(backend, bos_id=256, eos_token_ids=[257], templates=templates)
    call = "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    script = Script(reply=backend.encode(call * 2, add_special_tokens=False).ids)
    async with cluster(script=script, tokenizer=tokenizer, info={"max_model_len": 4096}) as c:
        messages = [*MESSAGES]
        for first in (0, 2):
            message = (await ask(c, messages=messages)).choices[0].message
            assert [call.id for call in message.tool_calls] == [f"functions.get_time:{first + n}" for n in range(2)]
            messages += [
                message.model_dump(exclude_none=True),
                *({"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in message.tool_calls),
            ]


async def test_tools_that_must_not_be_called_are_not_shown() -> None:
    async with replying(TWO, template=HERMES_TEMPLATE) as c:
        answer = await ask(c, tool_choice="none", extra_body={"return_token_ids": True})
        assert answer.choices[0].message.content == TWO
        assert answer.choices[0].message.tool_calls is None
        assert bytes(answer.prompt_token_ids) == b"[user]Hello[assistant]"


@pytest.mark.parametrize(
    ("choice", "names", "is_parallel"),
    [("required", {"get_weather", "get_time"}, True), (NAMED, {"get_time"}, False)],
    ids=["required", "named"],
)
async def test_a_required_call_is_a_grammar(choice: Any, names: set[str], is_parallel: bool) -> None:
    async with replying(ONE, template=HERMES_TEMPLATE) as c:
        answer = await ask(c, tool_choice=choice)
        assert answer.choices[0].finish_reason == "tool_calls"
        grammar = c.decode[0].submits[0].sampling.grammar
        assert {name for name in ("get_weather", "get_time") if name in grammar} == names
        assert ("call)*" in grammar) is is_parallel
        assert '"additionalProperties": false' in grammar
        await ask(c, tool_choice=choice, parallel_tool_calls=False)
        assert "call)*" not in c.decode[0].submits[1].sampling.grammar
        assert "additionalProperties" not in PARAMETERS


async def test_schemas_that_cannot_be_followed_are_refused_only_where_they_must_be() -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    async with replying("hi", template=HERMES_TEMPLATE) as c:
        with pytest.raises(openai.BadRequestError, match="not") as refused:
            await ask(c, tools=[WEATHER, bad], tool_choice="required")
        assert refused.value.param == "tools.1.function.parameters"
        named = {"type": "function", "function": {"name": "get_weather"}}
        await ask(c, tools=[WEATHER, bad], tool_choice=named)
        await ask(c, tools=[WEATHER, bad])


STRICT: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
STRICT_TIME: Any = {"type": "function", "function": {"name": "get_time", "strict": True}}


async def test_calls_of_strict_tools_are_bound_in_a_text() -> None:
    async with replying(f"I look.\n{ONE}", template=HERMES_TEMPLATE) as c:
        for fields in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}):
            [choice] = (await ask(c, tools=[STRICT, STRICT_TIME], **fields)).choices
            assert (choice.message.content, calls_of(choice)) == ("I look.", [("get_weather", ARGUMENTS)])
            followed = c.decode[0].submits[-1].sampling.grammar
            assert followed.count('"additionalProperties": false') == 2
            is_several = fields.get("parallel_tool_calls") is not False
            assert ("start: (before_call call | open object)*" in followed) is is_several
        await ask(c, tools=[STRICT, {"type": "function", "function": {"name": "search"}}])
        assert '%json {"type": "object", "x-guidance"' in c.decode[0].submits[-1].sampling.grammar
        assert "additionalProperties" not in str(STRICT)


@pytest.mark.parametrize(
    "bad",
    [{"type": "object", "not": {}}, {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}}],
    ids=["not", "look-ahead"],
)
async def test_a_strict_schema_that_cannot_be_followed_is_advice(bad: dict[str, Any]) -> None:
    unfollowed: Any = {"type": "function", "function": {"name": "f", "parameters": bad, "strict": True}}
    async with replying("hi", template=HERMES_TEMPLATE) as c:
        await ask(c, tools=[unfollowed, WEATHER])
        assert not c.decode[0].submits[-1].sampling.grammar
        await ask(c, tools=[unfollowed, STRICT])
        followed = c.decode[0].submits[-1].sampling.grammar
        assert followed.count('"additionalProperties": false') == 1
        assert '%json {"type": "object", "x-guidance"' in followed


UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}  # pydantic's set[str]
QWEN3_CODER_TEMPLATE = "{{ tools }}<tool_call>\n<function=x>"


async def test_sets_in_arguments() -> None:
    schema = {"type": "object", "properties": {"tags": UNIQUE}, "required": ["tags"]}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    async with replying("hi", template=HERMES_TEMPLATE) as c:
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            await ask(c, tools=[tool], tool_choice=choice)
            assert c.decode[0].submits[-1].sampling.grammar.startswith("places:")
        await ask(c, tools=[tool])  # in a text the rest of the schema is followed
        followed = c.decode[0].submits[-1].sampling.grammar
        assert '"additionalProperties": false' in followed
        assert "nique" not in followed
    async with replying("hi", template=QWEN3_CODER_TEMPLATE) as c:
        with pytest.raises(openai.BadRequestError, match="calls of tools that are not JSON") as refused:
            await ask(c, tools=[tool], tool_choice="required")
        assert refused.value.param == "tools"


PYTHON_TEMPLATE = "{{ tools }}[func_name1(params_name1=params_value1)]"


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (LLAMA3_TEMPLATE, f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'),
        (PYTHON_TEMPLATE, '[get_weather(city="Malmö 🌧")]'),
    ],
    ids=["llama3_json", "pythonic"],
)
async def test_strict_calls_that_no_marker_begins(template: str, call: str) -> None:
    async with replying(call, template=template) as c:
        for fields in ({}, {"parallel_tool_calls": False}):
            [choice] = (await ask(c, tools=[STRICT, TIME], **fields)).choices
            assert (choice.message.content, calls_of(choice)) == (None, [("get_weather", ARGUMENTS)])
            followed = c.decode[0].submits[-1].sampling.grammar
            assert "TEXT" in followed
            assert followed.count('"additionalProperties": false') == (template is LLAMA3_TEMPLATE)
        await ask(c, tools=TOOLS)
        assert not c.decode[0].submits[-1].sampling.grammar


LONG = "mcp__" + "x" * 123  # the longest name in the Responses API, and in Anthropic's


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (HERMES_TEMPLATE, call_text(LONG, "{}")),
        (HERMES_TEMPLATE, f'```json\n{{"name": "{LONG}", "arguments": {{}}}}\n```'),
        (LLAMA3_TEMPLATE, f'{{"name": "{LONG}", "parameters": {{}}}}'),
        (PYTHON_TEMPLATE, f"[{LONG}()]"),
    ],
)
async def test_long_names(template: str, call: str) -> None:
    tool: Any = {"type": "function", "function": {"name": LONG}}
    async with replying(call, template=template) as c:
        [choice] = (await ask(c, tools=[tool])).choices
        assert (choice.message.content, calls_of(choice)) == (None, [(LONG, "{}")])


async def test_an_answer_may_be_json_or_calls() -> None:
    async with replying(ONE, template=HERMES_TEMPLATE) as c:
        answer = await ask(c, response_format={"type": "json_object"})
        assert calls_of(answer.choices[0]) == [("get_weather", ARGUMENTS)]
        assert "calls | answer" in c.decode[0].submits[0].sampling.grammar
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(c, response_format=bad)
        assert refused.value.param == "response_format"


async def test_json_that_was_asked_for_is_no_call() -> None:
    """Its grammar is that of an answer, without constraints on arguments."""
    bare = '{"name": "get_weather", "arguments": {"town": 1}}'
    async with replying(bare, template=HERMES_TEMPLATE) as c:
        [choice] = (await ask(c, tools=[STRICT], response_format={"type": "json_object"})).choices
        assert (choice.message.content, calls_of(choice)) == (bare, [])
        [choice] = (await ask(c)).choices
        assert calls_of(choice) == [("get_weather", '{"town": 1}')]


async def test_a_forced_call_wins_over_the_answers_format() -> None:
    async with replying(TWO, template=HERMES_TEMPLATE) as c:  # instructor sends both
        answer = await ask(c, response_format={"type": "json_object"}, tool_choice=NAMED)
        assert calls_of(answer.choices[0]) == [("get_time", "{}")]
        assert "answer" not in c.decode[0].submits[0].sampling.grammar


@pytest.mark.parametrize("tokens_per_step", [1, 1000])
async def test_without_parallel_calls_the_answer_ends_with_the_first(tokens_per_step: int) -> None:
    async with replying(f"{ONE}\n{TWO} and more", tokens_per_step=tokens_per_step, template=HERMES_TEMPLATE) as c:
        answer = await ask(c, parallel_tool_calls=False, logprobs=True)
        [choice] = answer.choices
        num_tokens = len(ONE.removesuffix("\n</tool_call>").encode())
        assert answer.usage.completion_tokens == len(choice.logprobs.content) == num_tokens
        assert calls_of(choice) == [("get_weather", ARGUMENTS)]
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        [shown] = (await streamed(c, parallel_tool_calls=False)).values()
        assert [call[1:] for call in shown["calls"]] == [("get_weather", ARGUMENTS)]
        assert shown["finish_reason"] == "tool_calls"
        if tokens_per_step < len(ONE):
            await c.until(lambda: len(c.decode[0].cancels) == 2)  # the worker is told to stop
        await c.until(c.is_quiet)


async def test_a_call_that_was_cut_has_the_arguments_that_came() -> None:
    time, weather = ("get_time", "{}"), ("get_weather", '{"city": "M')
    cut = len(TWO) + 1 + ONE.index("alm")
    async with replying(f"{TWO}\n{ONE}", template=HERMES_TEMPLATE) as c:
        for fields, content, calls in (
            ({"max_tokens": cut}, None, [time, weather]),
            ({"max_tokens": len(TWO) + 20}, "\n" + ONE[:19], [time]),
            ({"max_tokens": len(TWO) + 20, "tool_choice": "required"}, None, [time]),
            ({"max_tokens": 20}, TWO[:20], []),
            ({"max_tokens": 20, "tool_choice": "required"}, "", []),
            ({"max_tokens": 40, "tool_choice": NAMED}, None, [("get_time", "")]),
        ):
            [choice] = (await ask(c, **fields)).choices
            assert (choice.message.content, calls_of(choice), choice.finish_reason) == (content, calls, "length")
            [shown] = (await streamed(c, **fields)).values()
            assert shown["content"] == (content or None)
            assert ([call[1:] for call in shown["calls"]], shown["finish_reason"]) == (calls, "length")
        [choice] = (await ask(c, stop=["get_weather"])).choices
        assert calls_of(choice) == [("get_time", "{}")]
        assert choice.message.content == "\n" + ONE.partition("get_weather")[0]
        assert choice.finish_reason == "tool_calls"


async def test_every_choice_has_calls_logprobs_and_usage_of_its_own() -> None:
    reply = f"ok {TWO}"
    async with replying(reply, template=HERMES_TEMPLATE) as c:
        answer = await ask(c, n=2, logprobs=True)
        assert [calls_of(choice) for choice in answer.choices] == [[("get_time", "{}")]] * 2
        ids = {choice.message.tool_calls[0].id for choice in answer.choices}
        assert len(ids) == 2
        for choice in answer.choices:
            assert "".join(item.token for item in choice.logprobs.content) == reply + "<eos>"
        assert answer.usage.completion_tokens == 2 * (len(reply) + 1)
        shown = await streamed(c, n=2, logprobs=True)
        for choice in shown.values():
            assert choice["content"] == "ok"
            assert [call[1:] for call in choice["calls"]] == [("get_time", "{}")]
            assert choice["finish_reason"] == "tool_calls"


async def test_a_call_is_streamed_as_it_comes() -> None:
    async with replying(ONE, template=HERMES_TEMPLATE) as c:
        chunks = [chunk.choices[0] async for chunk in await ask(c, stream=True, logprobs=True)]
        [begin, *rest] = [chunk.delta.tool_calls[0] for chunk in chunks if chunk.delta.tool_calls]
        assert (begin.index, begin.type, begin.id[:5]) == (0, "function", "call_")
        assert (begin.function.name, begin.function.arguments) == ("get_weather", "")
        assert len(rest) == len(ARGUMENTS)  # a chunk for each character that a step has completed
        assert "".join(call.function.arguments for call in rest) == ARGUMENTS
        assert all(chunk.delta.content is None for chunk in chunks)
        items = [item for chunk in chunks if chunk.logprobs for item in chunk.logprobs.content]
        assert b"".join(bytes(item.bytes) for item in items) == f"{ONE}<eos>".encode()


async def test_plain_chats_end_with_a_chunk_of_their_own() -> None:
    fields: Any = {"tools": openai.omit, "max_tokens": 2, "stream": True}
    async with replying("Hello", template=HERMES_TEMPLATE) as c:
        chunks = [chunk.choices[0] async for chunk in await ask(c, **fields)]
        assert [(chunk.delta.content, chunk.finish_reason) for chunk in chunks] == [
            ("", None), ("H", None), ("e", None), (None, "length"),
        ]  # fmt: skip
        chunks = [
            chunk.choices[0]
            async for chunk in await ask(c, **fields, logprobs=True, extra_body={"return_token_ids": True})
        ]
        assert [(chunk.delta.content, chunk.finish_reason, chunk.token_ids) for chunk in chunks[1:]] == [
            ("H", None, [72]), ("e", None, [101]), (None, "length", []),
        ]  # fmt: skip
        assert [bool(chunk.logprobs) for chunk in chunks] == [False, True, True, False]


class GetWeather(pydantic.BaseModel):
    city: str


async def test_the_openai_package_parses_arguments() -> None:
    text = f'<tool_call>\n{{"name": "GetWeather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    tools = [openai.pydantic_function_tool(GetWeather)]
    async with replying(text, template=HERMES_TEMPLATE) as c:
        answer = await c.openai.chat.completions.parse(model="dry-run", messages=MESSAGES, tools=tools)
        [call] = answer.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == GetWeather(city="Malmö 🌧")
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        again: Any = [*MESSAGES, answer.choices[0].message, result]
        await c.openai.chat.completions.create(model="dry-run", messages=again, tools=tools)
        async with c.openai.chat.completions.stream(model="dry-run", messages=MESSAGES, tools=tools) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
        [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert done.parsed_arguments == GetWeather(city="Malmö 🌧")
        deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
        assert "".join(event.arguments_delta for event in deltas) == ARGUMENTS
        assert len(deltas) > 10
        [call] = final.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == GetWeather(city="Malmö 🌧")
        assert final.choices[0].finish_reason == "tool_calls"
        again = [*MESSAGES, final.choices[0].message, {**result, "tool_call_id": call.id}]
        await c.openai.chat.completions.create(model="dry-run", messages=again, tools=tools)
