"""LiteLLM as its `openai`, `hosted_vllm`, `text-completion-openai` and `anthropic` providers."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import litellm
from common_cases import HELLO, MODEL, PERSON, WEATHER, Person

BASE = os.environ["OPENAI_BASE_URL"]
ROOT = BASE.removesuffix("/v1")
COMMON: dict[str, Any] = {"api_key": "none", "temperature": 0.0, "max_tokens": 60}
WEATHER_TOOL = {
    "name": "get_weather",
    "description": "The current weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def check_chat(provider: str) -> None:
    options = {**COMMON, "model": f"{provider}/{MODEL}", "api_base": BASE}
    hello = [{"role": "user", "content": HELLO}]
    whole = litellm.completion(messages=hello, **options)
    content = whole.choices[0].message.content
    assert content if provider == "text-completion-openai" else "Ann" in content, content  # a text goes on anyhow
    assert whole.usage.completion_tokens > 1
    chunks = [chunk for chunk in litellm.completion(messages=hello, stream=True, **options) if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content

    if provider == "text-completion-openai":
        return
    asked = {
        "messages": [{"role": "user", "content": WEATHER}],
        "tools": [{"type": "function", "function": WEATHER_TOOL}],
    }
    [call] = litellm.completion(**asked, **options).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"}), call
    built = litellm.stream_chunk_builder([*litellm.completion(stream=True, **asked, **options)])
    [streamed] = built.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments, built

    person = [{"role": "user", "content": PERSON}]
    typed = litellm.completion(messages=person, response_format=Person, **options).choices[0].message.content
    assert Person.model_validate_json(typed) == Person(name="Ann", age=31)
    embedded = litellm.embedding(model=f"{provider}/{MODEL}", input=["a cat"], api_base=BASE, api_key="none")
    assert len(embedded.data[0]["embedding"]) == 896


async def check_messages() -> None:
    options = {"api_base": ROOT, "api_key": "none", "max_tokens": 40, "temperature": 0.0}
    hello = [{"role": "user", "content": HELLO}]
    answer: Any = await litellm.anthropic.messages.acreate(model=f"anthropic/{MODEL}", messages=hello, **options)
    assert "Ann" in answer["content"][0]["text"], answer


def main() -> None:
    for provider in ("openai", "hosted_vllm", "text-completion-openai"):
        check_chat(provider)
    asyncio.run(check_messages())
    options = {"api_base": BASE, "api_key": "none"}
    answer = litellm.responses(model=f"openai/{MODEL}", input=HELLO, max_output_tokens=40, temperature=0.0, **options)
    assert "Ann" in answer.output[0].content[0].text, answer
    ranked = litellm.rerank(
        model=f"hosted_vllm/{MODEL}", query="cats", documents=["a cat", "a dog"], api_base=ROOT, api_key="none"
    )
    assert {entry["index"] for entry in ranked.results} == {0, 1}
    try:
        litellm.completion(**{**COMMON, "max_tokens": 10**6}, model=f"openai/{MODEL}", api_base=BASE, messages=[
            {"role": "user", "content": HELLO}
        ])  # fmt: skip
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("too long an answer was not refused as such")


main()
