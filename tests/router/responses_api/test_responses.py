"""The Responses API through OpenAI's official client, against workers with scripted replies."""

from __future__ import annotations

from typing import Any

import openai
import orjson
import pytest
from openai.types.responses import Response

from common.token_ids import unpack_ids
from router.responses_api.schemas import ResponsesBody
from router.responses_api.store import ResponseStore
from router.responses_api.translation import client_field
from tests.common.tools.tool_templates import HERMES_TEMPLATE, call_text
from tests.harness.router import Cluster, replying

TEMPLATE = HERMES_TEMPLATE + "{# <think> </think> #}"
WEATHER: Any = {
    "type": "function", "name": "get_weather", "description": "Now.", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
HELLO = {"role": "user", "content": "Hello"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "Rain."}
CALL = call_text("get_weather", '{"city": "Malmö"}')


async def ask(c: Cluster, given: Any = "Hello", **fields: Any) -> Any:
    return await responses(c).create(model="dry-run", input=given, max_output_tokens=400, **fields)


def responses(c: Cluster) -> Any:
    """Return the client's methods untyped: their types have thirty kinds of items that this server never sends."""
    return c.openai.responses


async def streamed(c: Cluster, given: Any = "Hello", **fields: Any) -> tuple[Any, list[Any]]:
    """Return the final response as the client's helper adds it up, and the events."""
    events = []
    async with responses(c).stream(model="dry-run", input=given, max_output_tokens=400, **fields) as stream:
        async for event in stream:
            events.append(event)
        return await stream.get_final_response(), events


def prompt_of(c: Cluster, index: int) -> str:
    return bytes(unpack_ids(c.decode[0].submits[index].prompt_token_ids)).decode()


@pytest.mark.parametrize("tokens_per_step", [1, 1000])
async def test_reasoning_text_and_calls_are_items(tokens_per_step: int) -> None:
    async with replying(f"<think>\nHm.\n</think>\n\nI look: é\n{CALL}", tokens_per_step, template=TEMPLATE) as c:
        plain = await ask(c, tools=[WEATHER])
        final, events = await streamed(c, tools=[WEATHER])
        for response in (plain, final):
            reasoning, message, call = response.output
            assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
            assert (message.role, message.content[0].text, message.status) == ("assistant", "I look: é", "completed")
            assert (call.name, call.arguments) == ("get_weather", '{"city": "Malmö"}')
            assert (response.status, response.output_text) == ("completed", "I look: é")
            assert response.usage.output_tokens_details.reasoning_tokens > 0
            assert response.id.startswith("resp_")
            Response.model_validate(response.to_dict())  # the client itself does not miss fields
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed"
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == "I look: é"
        added = [event.item.type for event in events if event.type == "response.output_item.added"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert added == [item.type for item in done] == ["reasoning", "message", "function_call"]
        assert [item.id for item in done] == [item.id for item in events[-1].response.output]


async def test_a_conversation_goes_on_from_an_earlier_response() -> None:
    async with replying(f"I look: é\n{CALL}", template=TEMPLATE) as c:
        first = await ask(c, "Weather?", tools=[WEATHER], instructions="Be brief.")
        output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "Rain."}
        await ask(c, [output], previous_response_id=first.id, tools=[WEATHER])
        assert "[system]Be brief.[user]Weather?" in prompt_of(c, 0)
        said = (
            '[assistant]I look: é\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Malmö"}}\n</tool_call>'
        )
        assert prompt_of(c, 1).endswith(f"[user]Weather?{said}[tool]Rain.[assistant]")
        assert "Be brief" not in prompt_of(c, 1)  # instructions hold for one response
        # The same by sending everything.
        items = [{"role": "user", "content": "Weather?"}, *(item.model_dump() for item in first.output), output]
        await ask(c, items, tools=[WEATHER])
        assert prompt_of(c, 2) == prompt_of(c, 1)


async def test_responses_are_kept_unless_the_client_does_not_want_that() -> None:
    async with replying("Yes.", template=TEMPLATE) as c:
        kept = await ask(c, "Really?", metadata={"a": "b"})
        found = await responses(c).retrieve(kept.id)
        assert found.model_dump() == kept.model_dump()
        assert found.metadata == {"a": "b"}
        items = await responses(c).input_items.list(kept.id)
        assert [item.to_dict()["content"] for item in items.data] == [[{"type": "input_text", "text": "Really?"}]]
        with pytest.raises(openai.BadRequestError, match="in the background"):
            await responses(c).cancel(kept.id)
        await responses(c).delete(kept.id)
        other = await ask(c, store=False)
        for response_id in (kept.id, other.id):
            with pytest.raises(openai.NotFoundError, match="no response"):
                await responses(c).retrieve(response_id)
        with pytest.raises(openai.NotFoundError, match="no response"):
            await ask(c, previous_response_id=kept.id)


async def test_input_items_come_in_pages() -> None:
    async with replying("Yes.", template=TEMPLATE) as c:
        given = [{"role": "user", "content": str(number)} for number in range(45)]
        kept = await ask(c, given)
        for order, expected in (("asc", given), ("desc", given[::-1]), (None, given[::-1])):
            query = {} if order is None else {"order": order}
            found = [item async for item in await responses(c).input_items.list(kept.id, **query)]
            assert {item.content[0].type for item in found} == {"input_text"}
            assert [item.content[0].text for item in found] == [message["content"] for message in expected]
        page = await responses(c).input_items.list(kept.id)
        assert (len(page.data), page.has_more) == (20, True)
        assert (page.first_id, page.last_id) == (page.data[0].id, page.data[-1].id)
        last = await responses(c).input_items.list(kept.id, after=found[-2].id, limit=1)
        assert (last.data, last.has_more) == ([found[-1]], False)
        none = await responses(c).input_items.list(kept.id, after=found[-1].id)
        assert (none.data, none.first_id, none.has_more) == ([], None, False)
        for wrong in ({"limit": 0}, {"limit": 101}, {"limit": "ten"}, {"after": "unknown"}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError) as refused:
                await responses(c).input_items.list(kept.id, **wrong)
            assert refused.value.param in wrong


async def test_input_may_refer_to_items_of_stored_responses() -> None:
    async with replying(f"<think>\nHm.\n</think>\n\nI look: é\n{CALL}", template=TEMPLATE) as c:
        first = await ask(c, tools=[WEATHER])
        output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "Rain."}
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        for given in (references, [{"id": item["id"]} for item in references]):
            await ask(c, [HELLO, *given, output], tools=[WEATHER])
        await ask(c, [HELLO, *(item.to_dict() for item in first.output), output], tools=[WEATHER])
        assert prompt_of(c, 1) == prompt_of(c, 2) == prompt_of(c, 3)
        assert "I look: é" in prompt_of(c, 1)
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(c, [HELLO, *references, RESULT], tools=[WEATHER])
        assert refused.value.param == "input.4"
        unstored = await ask(c, store=False)
        await responses(c).delete(first.id)
        for item in (unstored.output[0], first.output[0]):
            with pytest.raises(openai.NotFoundError, match="no item"):
                await ask(c, [{"type": "item_reference", "id": item.id}])


AGENTS: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers.",
    "tools": [{**WEATHER, "name": "spawn"}],
}


async def test_calls_name_the_namespace_of_their_function() -> None:
    async with replying(call_text("agents__spawn", '{"city": "Malmö"}') + CALL, template=TEMPLATE) as c:
        fields: Any = {"tools": [AGENTS, WEATHER]}
        plain = await ask(c, **fields)
        final, events = await streamed(c, **fields)
        named = [(None, "get_weather"), ("agents", "spawn")]
        for response in (plain, final, await responses(c).retrieve(plain.id)):
            calls = response.output
            assert [(call.namespace, call.name) for call in reversed(calls)] == named
            assert response.tools[0].tools[0].name == "spawn"
        added = [event.item for event in events if event.type == "response.output_item.added"]
        assert [(call.namespace, call.name) for call in reversed(added)] == named
        again = [event async for event in await responses(c).retrieve(final.id, stream=True)]
        assert [event.item.to_dict() for event in again if event.type == "response.output_item.added"] == [
            item.to_dict() for item in added
        ]
        result = {"type": "function_call_output", "call_id": plain.output[0].call_id, "output": "Rain."}
        await ask(c, [HELLO, plain.output[0].to_dict(), result], **fields)
        assert '{"name": "agents__spawn", "arguments": {"city": "Malm' in prompt_of(c, 2)
        wrong = {**AGENTS, "tools": [WEATHER, {**WEATHER, "name": "f", "parameters": {"type": "string"}}]}
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(c, tools=[WEATHER, wrong])
        assert refused.value.param == "tools.1.tools.1.parameters"


@pytest.mark.parametrize(("max_output_tokens", "tokens_per_step"), [(400, 1), (400, 7), (400, 1000), (40, 7), (5, 1)])
async def test_events_of_a_stored_response_come_again(max_output_tokens: int, tokens_per_step: int) -> None:
    async with replying(
        f"<think>\nHm.\n</think>\n\nI look: é\n{CALL}{CALL}", tokens_per_step, template=TEMPLATE
    ) as c:
        body = {"input": "?", "tools": [WEATHER], "max_output_tokens": max_output_tokens}
        sent = await c.http.post("/v1/responses", json={**body, "stream": True})
        events = sent.text.split("\n\n")[:-1]
        path = f"/v1/responses/{orjson.loads(events[0].partition('data: ')[2])['response']['id']}"
        again = await c.http.get(path, params={"stream": True})
        assert again.text == sent.text
        assert again.headers["content-type"] == sent.headers["content-type"]
        rest = await c.http.get(path, params={"stream": True, "starting_after": 3})
        assert rest.text.split("\n\n")[:-1] == events[4:]
        assert (await c.http.get(path, params={"stream": True, "starting_after": len(events)})).text == ""


async def test_a_response_that_was_not_streamed_has_events_too() -> None:
    async with replying(f"I look: é\n{CALL}", template=TEMPLATE) as c:
        kept = await ask(c, tools=[WEATHER])
        events = [event async for event in await responses(c).retrieve(kept.id, stream=True, starting_after=1)]
        assert [event.sequence_number for event in events] == list(range(2, len(events) + 2))
        assert events[-1].response.to_dict() == kept.to_dict()
        assert [event.delta for event in events if event.type.endswith("delta")] == ["I look: é", '{"city": "Malmö"}']
        for wrong in ({"stream": "maybe"}, {"stream": True, "starting_after": "x"}, {"starting_after": 1}):
            with pytest.raises(openai.BadRequestError) as refused:
                await responses(c).retrieve(kept.id, extra_query=wrong)
            assert refused.value.param in wrong


async def test_an_answer_that_was_cut_is_incomplete() -> None:
    async with replying("One. Two.", template=TEMPLATE) as c:
        fields: Any = {"model": "dry-run", "input": "?", "max_output_tokens": 4}
        plain = await responses(c).create(**fields)
        async with responses(c).stream(**fields) as stream:
            kinds = [event.type async for event in stream]
        assert (plain.status, plain.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (plain.output_text, plain.output[0].status) == ("One.", "incomplete")
        assert kinds[-1] == "response.incomplete"
        assert (await responses(c).retrieve(plain.id)).to_dict() == plain.to_dict()


async def test_a_format_a_choice_and_an_effort_reach_the_worker() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    async with replying('{"a": 1}', template=TEMPLATE) as c:
        response = await ask(c, text=wanted, reasoning={"effort": "low"}, temperature=0.5)
        assert (response.text.format.name, response.reasoning.effort, response.temperature) == ("a", "low", 0.5)
        await ask(c, tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"})
        grammars = [submit.sampling.grammar for submit in c.decode[0].submits]
        assert all(grammars)
        assert "get_weather" in grammars[1]
        with pytest.raises(openai.BadRequestError, match="name and a schema"):
            await ask(c, text={"format": {"type": "json_schema", "name": "a"}})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include.0"),
        ({"extra_body": {"unknown": 1}}, "unknown"),
        ({"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"given": [HELLO, HELLO, RESULT], "instructions": "Be brief."}, "input.2"),
        ({"given": "x" * 5000}, "input"),
        ({"tools": [{**WEATHER, "parameters": {"type": "string"}}]}, "tools.0.parameters"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text.format"),
        ({"extra_body": {"max_output_tokens": 5000}}, "max_output_tokens"),
        ({"extra_body": {"temperature": "0.5"}}, "temperature"),
        ({"extra_body": {"top_p": True}}, "top_p"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with replying("x", template=TEMPLATE) as c:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(c, **fields)
        assert refused.value.param == param
        assert "messages." not in refused.value.message


def test_the_client_reads_of_its_own_items() -> None:
    said = {"role": "assistant", "content": "a"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    body = ResponsesBody.model_validate({"input": [HELLO, {"type": "reasoning"}, said, call, RESULT, HELLO]})
    named = [client_field(body, 2, f"messages.{index}.content") for index in range(2, 6)]
    assert named == ["input.0", "input.2", "input.4", "input.5"]
    assert client_field(body, 2, "messages.1") == client_field(body, 0, "messages") == "input"


async def test_the_answer_names_fields_without_effect() -> None:
    async with replying("x", template=TEMPLATE) as c:
        labels = {"service_tier": "flex", "include": [], "metadata": {}, "client_metadata": {"session_id": "1"}}
        for stream in (False, True):
            asked = {"model": "dry-run", "input": "?", "stream": stream, **labels}
            answer = await c.http.post("/v1/responses", json=asked)
            assert answer.headers["x-mini-infer-ignored"] == "service_tier, include, client_metadata"
        assert '"service_tier":"flex"' in answer.text  # a label all the same
        advice = {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}
        strict = {**WEATHER, "strict": True, "parameters": {"type": "object", "not": {}}}
        fields: Any = {"model": "dry-run", "input": "?", **advice, "tools": [WEATHER, strict | {"name": "f"}]}
        for background in (False, True):
            answer = await c.http.post("/v1/responses", json={**fields, "background": background})
            named = answer.headers["x-mini-infer-ignored"]
            assert named == "reasoning.summary, reasoning.effort, text.verbosity, tools.1.strict"


async def test_a_built_in_tool_is_refused_with_advice() -> None:
    async with replying("x", template=TEMPLATE) as c:
        with pytest.raises(openai.BadRequestError, match="no 'web_search' tool: leave it out") as refused:
            await ask(c, tools=[WEATHER, {"type": "web_search"}])
        assert (refused.value.param, refused.value.code) == ("tools.1.type", "unsupported_parameter")


async def test_input_tokens_are_those_of_the_response() -> None:
    async with replying("Yes.", template=TEMPLATE) as c:
        first = await ask(c)
        fields: Any = {"previous_response_id": first.id, "tools": [WEATHER], "instructions": "Be brief."}
        response = await ask(c, "And now?", **fields)
        counted = await responses(c).input_tokens.count(model="dry-run", input="And now?", **fields)
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", response.usage.input_tokens)
        with pytest.raises(openai.BadRequestError) as refused:
            await responses(c).input_tokens.count(model="dry-run", input=[HELLO, RESULT])
        assert refused.value.param == "input.1"


async def test_an_image_is_refused_with_the_reason() -> None:
    async with replying("x", template=TEMPLATE) as c:
        with pytest.raises(openai.BadRequestError, match="only text parts are supported"):
            await ask(c, [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}])


async def test_vllms_fields_are_those_of_chats() -> None:
    async with replying("One. Two.", template=TEMPLATE) as c:
        fields = {
            "ignore_eos": True,
            "seed": 7,
            "top_k": 3,
            "repetition_penalty": 1.5,
            "priority": 2,
            "cache_salt": "s",
        }
        response = await ask(c, extra_body={**fields, "stop": [" T"], "include_stop_str_in_output": True})
        assert response.output_text == "One. T"
        assert "seed" not in response.to_dict()  # OpenAI's responses have no such fields
        submit = c.decode[0].submits[0]
        sampling = submit.sampling
        assert (sampling.ignore_eos, sampling.seed, sampling.top_k, submit.priority) == (True, 7, 3, 2)
        assert (sampling.repetition_penalty, submit.cache_salt) == (1.5, "s")
        for wrong in ({"ignore_eos": "yes"}, {"seed": "1"}, {"stop": [""]}, {"top_k": -2}):
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(c, extra_body=wrong)
            assert (refused.value.param or "").partition(".")[0] in wrong


async def test_fields_that_ask_for_nothing_are_accepted() -> None:
    async with replying("x", template=TEMPLATE) as c:
        for fields in (
            {"conversation": None, "prompt": None, "max_tool_calls": None, "top_logprobs": 0, "truncation": None},
            {"top_k": 0, "repetition_penalty": 1.0, "priority": 0, "stop": [], "cache_salt": None},
        ):
            await ask(c, extra_body=fields)
        with pytest.raises(openai.BadRequestError, match="top_logprobs is not supported"):
            await ask(c, top_logprobs=5)


async def test_a_stream_that_fails_says_so() -> None:
    async with replying("x" * 50, die_after_tokens=5, max_retries=0, template=TEMPLATE) as c:
        stream = await responses(c).create(model="dry-run", input="?", stream=True)
        *_, error, failed = [event async for event in stream]
        assert error.type == "error"
        assert "gave up" in error.message
        assert (failed.type, failed.response.status) == ("response.failed", "failed")
        assert "gave up" in failed.response.error.message
        kept = await responses(c).retrieve(failed.response.id)
        assert kept.to_dict() == failed.response.to_dict()
        assert kept.output_text.startswith("x")
        again = [event.type async for event in await responses(c).retrieve(kept.id, stream=True)]
        assert again[-2:] == ["error", "response.failed"]


def test_the_store_forgets_the_least_recently_used() -> None:
    store = ResponseStore(max_responses=2)
    for name in "abc":
        store.add({"id": name, "output": []}, [], [], [])
        if name == "b":
            store.get("a")
    assert store.get("a").response == b'{"id":"a","output":[]}'
    with pytest.raises(Exception, match="no response 'b'"):
        store.get("b")
    store.delete("a")
    assert len(store) == 1
    store.delete("c")
    assert store.num_bytes == 0
    for text in ("long" * 10, ""):
        store.add({"id": "a", "text": text, "output": []}, [], [], [])
    assert (len(store), store.num_bytes) == (1, store.get("a").num_bytes)
    small = ResponseStore(max_bytes=120)
    for number in range(20):
        small.add({"id": str(number), "output": []}, [], [], [])
        assert small.num_bytes <= 120
    small.add({"id": "x" * 200, "output": []}, [], [], [])
    assert len(small) == 0
