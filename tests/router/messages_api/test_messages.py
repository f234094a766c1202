"""Anthropic's official client against workers with scripted replies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import InvalidRequestError
from common.token_ids import unpack_ids
from router.messages_api.schemas import MessagesBody
from router.messages_api.translation import chat_fields, client_field
from tests.common.tools.tool_templates import HERMES_TEMPLATE, call_text
from tests.harness.router import Cluster
from tests.harness.router import replying as replying_cluster

if TYPE_CHECKING:
    import anthropic  # takes 2 s: only where a test runs, since each process that collects tests imports all modules

TEMPLATE = HERMES_TEMPLATE + "{# <think> </think> #}"
HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "name": "get_weather", "description": "Now.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
RESULT: Any = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "c"}]}]
CALL = call_text("get_weather", '{"city": "Malmö"}')


@asynccontextmanager
async def replying(text: str, **options: Any) -> AsyncIterator[tuple[Cluster, anthropic.AsyncAnthropic]]:
    import anthropic

    async with (
        replying_cluster(text, **{"template": TEMPLATE, **options}) as c,
        anthropic.AsyncAnthropic(
            base_url=str(c.http.base_url), api_key=c.gateway.config.api_key or "none", max_retries=0
        ) as client,
    ):
        yield c, client


async def ask(client: anthropic.AsyncAnthropic, **fields: Any) -> Any:
    return await client.messages.create(**{"model": "dry-run", "max_tokens": 400, "messages": HELLO, **fields})


async def streamed(client: anthropic.AsyncAnthropic, **fields: Any) -> Any:
    """Return the final message as the client adds it up from events."""
    async with client.messages.stream(
        **{"model": "dry-run", "max_tokens": 400, "messages": HELLO, **fields}
    ) as stream:
        return await stream.get_final_message()


async def test_a_stream_begins_with_the_input_tokens_that_it_ends_with() -> None:
    async with replying("One.", cached_tokens=3) as (c, client):
        events = await client.messages.create(model="dry-run", max_tokens=9, messages=HELLO, stream=True)
        usages: list[Any] = []
        async for event in events:
            if event.type == "message_start":
                usages.append(event.message.usage)
            elif event.type == "message_delta":
                usages.append(event.usage)
        begin, end = usages
        assert begin.output_tokens == 0
        assert begin.cache_read_input_tokens == end.cache_read_input_tokens == 3
        num_prompt_tokens = len(unpack_ids(c.decode[0].submits[0].prompt_token_ids))
        assert begin.input_tokens == end.input_tokens == num_prompt_tokens - 3


@pytest.mark.parametrize("tokens_per_step", [1, 1000])
async def test_thinking_text_and_calls_are_blocks(tokens_per_step: int) -> None:
    reply = f"<think>\nHm.\n</think>\n\nI look: é\n{CALL}"
    async with replying(reply, tokens_per_step=tokens_per_step) as (c, client):
        for message in (await ask(client, tools=[WEATHER]), await streamed(client, tools=[WEATHER])):
            thinking, text, call = message.content
            assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
            assert (text.type, text.text) == ("text", "I look: é")
            assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Malmö"})
            assert call.id
            assert (message.role, message.stop_reason, message.model) == ("assistant", "tool_use", "dry-run")
            assert message.usage.output_tokens == len(reply.encode()) + 1  # the end of the sequence
        prompt_tokens = len(unpack_ids(c.decode[0].submits[0].prompt_token_ids))
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == prompt_tokens
        counted = await client.messages.count_tokens(model="dry-run", messages=HELLO, tools=[WEATHER])
        assert counted.input_tokens == prompt_tokens


async def test_thinking_may_be_left_out_of_the_answer() -> None:
    async with replying("<think>\nHm.\n</think>\n\nYes.") as (_, client):
        wanted = {"type": "adaptive", "display": "omitted"}
        for message in (await ask(client, thinking=wanted), await streamed(client, thinking=wanted)):
            assert [block.type for block in message.content] == ["text"]
        assert (await ask(client, thinking={**wanted, "display": "summarized"})).content[0].thinking == "Hm."


async def test_thinking_ends_with_its_signature() -> None:
    async with replying("<think>\nHm.\n</think>\n\nYes.") as (_, client):
        events = await client.messages.create(model="dry-run", max_tokens=99, messages=HELLO, stream=True)
        told = [event.delta.type if event.type == "content_block_delta" else event.type async for event in events]
        assert [kind for kind, _ in groupby(told)] == [
            "message_start", "content_block_start", "thinking_delta", "signature_delta", "content_block_stop",
            "content_block_start", "text_delta", "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({}, "One. Two.", "end_turn", None),
        ({"max_tokens": 4}, "One.", "max_tokens", None),
        ({"stop_sequences": [" Two"]}, "One.", "stop_sequence", " Two"),
        ({"stop_sequences": [*"ABCDEFGHIJKLMNQ", " Two"]}, "One.", "stop_sequence", " Two"),
    ],
)
async def test_stop_reasons(fields: dict[str, Any], text: str, reason: str, sequence: str | None) -> None:
    async with replying("One. Two.") as (_, client):
        for message in (await ask(client, **fields), await streamed(client, **fields)):
            assert message.content[0].text == text
            assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Malmö', {}),  # a text that is not complete is no argument yet
        ('{"days": 3, "city": "Malmö', {"days": 3}),
        ('{"places": [{"city": "Malmö"}, {"city": "L', {"places": [{"city": "Malmö"}, {}]}),
        ('{"days": 10000000000000000000000', {"days": 1e22}),
        ('{"cit', {}),
        ("", {}),
    ],
)
async def test_a_call_that_was_cut_has_the_arguments_that_are_complete(arguments: str, expected: Any) -> None:
    begun = '<tool_call>\n{"name": "get_weather", "arguments": ' + arguments
    async with replying(begun + "}" * 100) as (_, client):
        fields = {"tools": [WEATHER], "max_tokens": len(begun.encode())}
        for message in (await ask(client, **fields), await streamed(client, **fields)):
            assert message.stop_reason == "max_tokens"
            assert [(block.type, block.name, block.input) for block in message.content] == [
                ("tool_use", "get_weather", expected)
            ]


async def test_the_answer_names_fields_without_effect() -> None:
    async with replying("x") as (_, client):
        asked = {"model": "dry-run", "max_tokens": 4, "messages": HELLO, "service_tier": "auto"}
        answer = await client.messages.with_raw_response.create(**asked)
        assert answer.headers["x-mini-infer-ignored"] == "service_tier"
        labels: Any = {"diagnostics": {"previous_message_id": None}, "cache_control": {"type": "ephemeral"}}
        answer = await client.messages.with_raw_response.create(**asked, **labels)
        assert answer.headers["x-mini-infer-ignored"] == "cache_control, diagnostics, service_tier"
        advice: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}}
        answer = await client.messages.with_raw_response.create(**{**asked, **advice})
        named = "service_tier, thinking.budget_tokens, output_config.effort, thinking"
        assert answer.headers["x-mini-infer-ignored"] == named


async def test_an_answer_may_end_where_the_context_does() -> None:
    async with replying("x" * 5000) as (_, client):
        for message in (await ask(client, max_tokens=8000), await streamed(client, max_tokens=8000)):
            assert message.stop_reason == "model_context_window_exceeded"
            assert message.usage.input_tokens + message.usage.output_tokens == 4096
        assert (await ask(client, max_tokens=9)).stop_reason == "max_tokens"


async def test_the_clients_tool_runner_goes_on_without_a_thread() -> None:
    import anthropic

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Now."""
        return f"Rain in {city}."

    async with replying(CALL) as (c, client):
        fields: Any = {"model": "dry-run", "max_tokens": 400, "messages": HELLO, "tools": [get_weather]}
        runner = client.beta.messages.tool_runner(max_iterations=2, **fields)
        assert [message.stop_reason async for message in runner] == ["tool_use", "tool_use"]
        asked = bytes(unpack_ids(c.decode[0].submits[1].prompt_token_ids)).decode()
        assert "[tool]Rain in Malmö.[assistant]" in asked
        with pytest.raises(anthropic.BadRequestError, match="send the whole conversation"):
            await ask(client, extra_body={"thread": {"type": "create"}})


async def test_errors_have_anthropics_types() -> None:
    async with replying("x", die_after_tokens=0, max_retries=0) as (c, _):
        body = {"model": "m", "max_tokens": 9, "messages": HELLO}
        unknown = await c.http.post("/v1/messages", json=body)
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        failed = await c.http.post("/v1/messages", json={**body, "model": "dry-run"})
        assert (failed.status_code, failed.json()["error"]["type"]) == (503, "overloaded_error"), failed.text


async def test_errors_have_anthropics_shape() -> None:
    import anthropic

    async with replying("x") as (_, client):
        with pytest.raises(anthropic.BadRequestError, match="temperature") as refused:
            await ask(client, extra_body={"temperature": 2.0})
        body: Any = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert set(body["error"]) == {"type", "message"}
        with pytest.raises(anthropic.NotFoundError):
            await ask(client, model="unknown")
        for fields, told in (
            ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
            ({"extra_body": {"temperature": "0.5"}}, "temperature"),
            ({"extra_body": {"top_p": True}}, "top_p"),
            ({"stop_sequences": ["a", ""]}, "stop_sequences.1"),
            ({"tools": [WEATHER, WEATHER]}, "tools.0.name"),
            ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools.0.input_schema"),
            ({"messages": HELLO * 2 + RESULT, "system": "s"}, "messages.2: this tool result answers no"),
            ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt is too long: This model's maximum"),
            ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type: this server has no 'web_sea"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=f"'message': .{told}"):
                await ask(client, **fields)
    async with replying("x", api_key="secret") as (_, client):
        assert (await ask(client)).content[0].text == "x"  # x-api-key
        with pytest.raises(anthropic.AuthenticationError):
            await ask(client.copy(api_key="wrong"))


async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    import anthropic

    async with replying("x" * 50, die_after_tokens=5, max_retries=0) as (_, client):
        with pytest.raises(anthropic.APIStatusError, match="gave up"):
            await streamed(client)


# -- translation -----------------------------------------------------------------------------------------------


def fields_of(**body: Any) -> dict[str, Any]:
    return chat_fields(MessagesBody.model_validate({"max_tokens": 9, "messages": HELLO, **body}))


def test_blocks_become_chat_messages() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "c"}], "is_error": True},
            {"type": "text", "text": "d"}]},
    ]  # fmt: skip
    assert fields_of(messages=messages, system=[{"type": "text", "text": "s"}])["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "Error: c"},
        {"role": "user", "content": "d"},
    ]  # fmt: skip


def thought(text: str, *blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": text, "signature": ""}, *blocks]}


SYSTEM: Any = {"role": "system", "content": [{"type": "text", "text": "be brief"}], "clear_at": "next_user_message"}


@pytest.mark.parametrize(
    ("later", "is_shown"), [([], True), ([{"role": "assistant", "content": "b"}, *HELLO], False)]
)
def test_a_system_message_may_be_cleared_by_the_users_next_message(later: Any, is_shown: bool) -> None:
    found = fields_of(messages=[*HELLO, SYSTEM, *later])["messages"]
    assert ({"role": "system", "content": "be brief"} in found) is is_shown
    found = fields_of(messages=[*HELLO, {**SYSTEM, "clear_at": "never"}, *later])["messages"]
    assert found[1] == {"role": "system", "content": "be brief"}


PLAIN = "[{{ message.role }}]{{ message.content }}"
IS_LATER = "message.role == 'system' and not loop.first"
REFUSING = f"{{% for message in messages %}}{{% if {IS_LATER} %}}{{{{ x.y.z }}}}{{% endif %}}{PLAIN}{{% endfor %}}"
FORGETFUL = f"{{% for message in messages %}}{{% if not ({IS_LATER}) %}}{PLAIN}{{% endif %}}{{% endfor %}}"


@pytest.mark.parametrize("template", [REFUSING, FORGETFUL, TEMPLATE])
async def test_templates_without_later_system_messages_show_them_as_the_users(template: str) -> None:
    import anthropic

    reminder = {"role": "system", "content": "Now."}
    messages = [*HELLO, reminder, {"role": "assistant", "content": "Hi."}, reminder, *HELLO]
    async with replying("x", template=template) as (c, client):
        await ask(client, system="Be brief.", messages=messages)
        prompt = bytes(unpack_ids(c.decode[0].submits[0].prompt_token_ids)).decode()
        told = "<system-reminder>\nNow.\n</system-reminder>"
        if template is TEMPLATE:
            expected = "[system]Be brief.[user]Hello[system]Now.[assistant]Hi.[system]Now.[user]Hello"
        else:
            expected = f"[system]Be brief.[user]Hello\n\n{told}[assistant]Hi.[user]{told}\n\nHello"
        assert prompt.removesuffix("[assistant]") == expected
        await ask(client, messages=[reminder, *HELLO])
        prompt = bytes(unpack_ids(c.decode[0].submits[1].prompt_token_ids)).decode()
        assert prompt.removesuffix("[assistant]") == "[system]Now.[user]Hello"
        counted = await client.messages.count_tokens(model="dry-run", system="Be brief.", messages=messages)
        assert counted.input_tokens == len(unpack_ids(c.decode[0].submits[0].prompt_token_ids))
        wrong = [*HELLO, reminder, *HELLO, *RESULT]
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.3: this tool result"):
            await ask(client, messages=wrong)


def test_a_message_of_the_user_is_never_cleared() -> None:
    with pytest.raises(InvalidRequestError, match="only system messages"):
        fields_of(messages=[{**HELLO[0], "clear_at": "next_user_message"}, *HELLO])


def test_errors_name_the_message_even_if_one_before_it_is_cleared() -> None:
    body = MessagesBody.model_validate({"max_tokens": 9, "messages": [*HELLO, SYSTEM, *HELLO, *RESULT]})
    assert client_field(body, True, "messages.2.tool_call_id") == "messages.3"


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({"keep": "all"}, ["a", "b", "c", "d"]),
        ({"keep": {"type": "all"}}, ["a", "b", "c", "d"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, ["b", "c", "d"]),
        ({}, ["d"]),
    ],
)
def test_old_thinking_may_be_cleared(keep: dict[str, Any], kept: list[str]) -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    asked = {"type": "text", "text": "x"}
    messages = [*HELLO, thought("a", asked), *HELLO, thought("b", call), *RESULT, thought("c", asked), *HELLO]
    messages += [thought("d", asked), *HELLO, {"role": "assistant", "content": "y"}, *HELLO]
    edits = [{"type": "clear_thinking_20251015", **keep}]
    found = fields_of(messages=messages, context_management={"edits": edits})["messages"]
    assert [message["reasoning_content"] for message in found if "reasoning_content" in message] == kept


def test_claude_codes_label_of_a_request_is_no_part_of_the_prompt() -> None:
    label = "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=cli; cch=eb6c6;"
    system = [{"type": "text", "text": label}, {"type": "text", "text": "s"}]
    assert fields_of(system=system)["messages"][0] == {"role": "system", "content": "s"}
    assert fields_of(system=system[:1])["messages"] == [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    made = fields_of(tools=[{"name": "f", "input_schema": {"type": "object"}}], tool_choice=choice)
    assert made | expected == made
    assert ("parallel_tool_calls" in made) == ("parallel_tool_calls" in expected)


@pytest.mark.parametrize("strict", [True, None])
def test_strict_tools_stay_strict(strict: bool | None) -> None:
    made = fields_of(tools=[{"name": "f", "input_schema": {"type": "object"}, "strict": strict}])
    assert made["tools"][0]["function"].get("strict") is strict


def test_what_cannot_be_translated_is_refused() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    with pytest.raises(InvalidRequestError, match=r"messages\.0\.content\.0: no tool_use in user messages"):
        fields_of(messages=[{"role": "user", "content": [call]}])
    with pytest.raises(InvalidRequestError, match="needs a name"):
        fields_of(tool_choice={"type": "tool"})


def test_an_assistants_last_message_is_the_beginning_of_the_answer() -> None:
    made = fields_of(messages=[*HELLO, {"role": "assistant", "content": "Once"}])
    assert (made["continue_final_message"], made["add_generation_prompt"]) == (True, False)


def test_an_answer_may_have_to_follow_a_schema() -> None:
    made = fields_of(output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert made["reasoning_effort"] == "low"
    assert made["response_format"]["json_schema"] == {"name": "answer", "schema": {"type": "object"}, "strict": True}


def test_thinking_may_be_turned_off() -> None:
    assert fields_of(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}
    assert fields_of(thinking={"type": "enabled", "budget_tokens": 2048})["chat_template_kwargs"] == {
        "enable_thinking": True
    }
