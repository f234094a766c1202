"""Qwen2.5-Coder-0.5B-Instruct, a real GGUF file whose template takes tools, served by real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.harness.cluster import Cluster, running_cluster
from tests.models.real_files import QWEN_CODER

pytestmark = [pytest.mark.models, pytest.mark.wing("engine.gguf"), pytest.mark.wing("router.tools")]
MODEL = QWEN_CODER.path
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
MAIL = {
    "type": "object",
    "properties": {"to": {"type": "string"}, "subject": {"type": "string"}, "body": {"type": "string"}},
    "required": ["to", "subject", "body"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": told, "parameters": parameters}}
    for name, told, parameters in (
        ("get_weather", "The current weather in a city.", PLACE),
        ("send_mail", "Send an e-mail.", MAIL),
    )
]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris right now?"}]
MAIL_TASK: Any = [
    {
        "role": "user",
        "content": "Send an e-mail to ann@example.com: tell her in five sentences that the meeting moves to Monday.",
    }
]
TURNS = (
    "Write a Python function `add` that returns the sum of two numbers.",
    "Add type hints for int to it.",
    "Now write `subtract` in the same way.",
    "Which of the two gives 5 for the arguments 7 and 2?",
    "Write one assert for `add`.",
    "Repeat the name of the function that I asked for first.",
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    arguments = (f"--model={MODEL()}", "--num-gpu-blocks=512", "--num-threads=1", "--max-model-len=4096")
    with running_cluster(num_prefill=1, num_decode=2, engine_args=arguments) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    shared.start_killed()
    return shared


def chat(cluster: Cluster, messages: Sequence[Any], max_tokens: int = 300, **fields: Any) -> Any:
    """Return one greedy answer."""
    extra = {"cache_salt": fields.pop("cache_salt")} if "cache_salt" in fields else None
    with cluster.client() as client:
        return client.chat.completions.create(
            model=MODEL().stem,
            messages=[*messages],
            temperature=0.0,
            max_tokens=max_tokens,
            extra_body=extra,
            **fields,
        ).choices[0]


def streamed_call(cluster: Cluster, kill_after: int = 0) -> tuple[str, str, str | None]:
    """Return a call's name and arguments and the finish reason. kill_after: argument deltas before a SIGKILL."""
    name, arguments, reason, num_deltas = "", "", None, 0
    with cluster.client() as client:
        stream = client.chat.completions.create(
            model=MODEL().stem, messages=MAIL_TASK, tools=TOOLS, temperature=0.0, max_tokens=400, stream=True
        )
        for chunk in stream:
            [choice] = chunk.choices
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
                num_deltas += bool(call.function.arguments)
                if num_deltas == kill_after and call.function.arguments:
                    [worker] = [each for each in ("decode-0", "decode-1") if cluster.load_of(each)["running"]]
                    cluster.services[worker].kill()
    return name, arguments, reason


def test_the_model_calls_a_tool_on_its_own_and_reads_the_result(cluster: Cluster) -> None:
    choice = chat(cluster, WEATHER, tools=TOOLS)
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    told = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": "17 C", "sky": "cloudy"}'}
    answer = chat(cluster, [*WEATHER, choice.message.model_dump(exclude_none=True), told], tools=TOOLS)
    assert "17" in answer.message.content


def test_a_call_survives_a_kill_in_its_middle(cluster: Cluster) -> None:
    name, arguments, reason = expected = streamed_call(cluster)
    assert (name, reason) == ("send_mail", "tool_calls")
    assert json.loads(arguments)["to"] == "ann@example.com"
    assert streamed_call(cluster, kill_after=10) == expected


def test_json_by_schema(cluster: Cluster) -> None:
    schema = {
        "type": "object",
        "properties": {"language": {"type": "string", "maxLength": 30}, "year": {"type": "integer"}},
        "required": ["language", "year"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "origin", "schema": schema}}
    question = {"role": "user", "content": "Which programming language did Guido van Rossum publish, and when?"}
    found = json.loads(chat(cluster, [question], response_format=wanted).message.content)
    assert found.keys() == {"language", "year"}
    assert found["language"] == "Python"


def test_six_turns_are_the_same_without_a_prefill_worker(cluster: Cluster) -> None:
    def conversation(cache_salt: str) -> list[str]:
        messages: list[Any] = []
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            answer = chat(cluster, messages, 100, cache_salt=cache_salt).message.content
            messages.append({"role": "assistant", "content": answer})
        return [message["content"] for message in messages[1::2]]

    apart = conversation("apart")
    assert "def add(" in apart[0]
    assert "int" in apart[1]
    assert "def subtract(" in apart[2]
    assert "add" in apart[5]
    cluster.services["prefill-0"].kill()
    assert conversation("together") == apart
