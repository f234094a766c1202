"""LangChain's ChatOpenAI, OpenAI and OpenAIEmbeddings."""

from __future__ import annotations

import json
from functools import reduce
from operator import add
from typing import Any

from common_cases import HELLO, MODEL, PERSON, WEATHER, Person, report
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings


@tool
def get_weather(city: str) -> str:
    """The current weather in a city."""
    return json.dumps(report(city))


def check_chat(model: ChatOpenAI) -> None:
    whole = model.invoke(HELLO)
    assert "Ann" in whole.text
    assert whole.usage_metadata["output_tokens"] > 1
    total: Any = reduce(add, model.stream(HELLO))
    assert total.text == whole.text, total
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"], total

    bound, question = model.bind_tools([get_weather]), HumanMessage(WEATHER)
    called = bound.invoke([question])
    [call] = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"}), call
    streamed: Any = reduce(add, bound.stream([question]))
    assert [each["args"] for each in streamed.tool_calls] == [{"city": "Paris"}], streamed
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert "17" in bound.invoke([question, called, result]).text

    assert model.with_structured_output(Person).invoke(PERSON) == Person(name="Ann", age=31)


def main() -> None:
    model = ChatOpenAI(model=MODEL, temperature=0.0, max_tokens=200, stream_usage=True)
    check_chat(model)
    check_chat(ChatOpenAI(model=MODEL, temperature=0.0, max_tokens=200, use_responses_api=True))
    for method in ("function_calling", "json_mode"):
        typed = model.with_structured_output(Person, method=method)
        assert typed.invoke(f"As JSON with name and age: {PERSON}") == Person(name="Ann", age=31), method
    scored = model.bind(logprobs=True, top_logprobs=2).invoke(HELLO).response_metadata["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in scored)
    assert len(model.generate([[HumanMessage(HELLO)]], n=2).generations[0]) == 2
    assert OpenAI(model=MODEL, temperature=0.0, max_tokens=20).invoke("def add(a, b):")
    vectors = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False).embed_documents(["a cat", "a dog"])
    assert [len(vector) for vector in vectors] == [896, 896]


main()
