"""Gemma-3-270M, a real GGUF file without a chat template, with windows in five of six layers, served by processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cluster import Cluster, running_cluster
from tests.models.real_files import GEMMA3

pytestmark = [pytest.mark.models, pytest.mark.wing("engine.gguf"), pytest.mark.wing("router.tools")]
MODEL = GEMMA3.path
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "sights": {
            "type": "array",
            "items": {"enum": ["tower", "river", "museum"]},
            "uniqueItems": True,
            "minItems": 2,
        },
    },
    "required": ["city", "sights"],
    "additionalProperties": False,
}
TURNS = ("Tell me about Paris.", "And its river?", "Which museum is the largest?", "Who painted there?")


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    arguments = (f"--model={MODEL()}", "--num-gpu-blocks=512", "--num-threads=1", "--max-model-len=4096")
    with running_cluster(
        num_prefill=1, num_decode=2, engine_args=arguments, router_args=("--chat-template=gemma",)
    ) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    shared.start_killed()
    return shared


def chat(cluster: Cluster, content: str, **fields: Any) -> Any:
    """Return one greedy answer."""
    with cluster.client() as client:
        return client.chat.completions.create(
            model=MODEL().stem,
            messages=[{"role": "user", "content": content}],
            temperature=0.0,
            max_tokens=200,
            **fields,
        ).choices[0]


def test_json_by_schema(cluster: Cluster) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    found = json.loads(chat(cluster, "Describe Paris as JSON.", response_format=wanted).message.content)
    assert found.keys() == {"city", "sights"}
    assert len(set(found["sights"])) == len(found["sights"]) >= 2


def test_a_tool_that_is_required(cluster: Cluster) -> None:
    place = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": place}}
    choice = chat(
        cluster, "What is the weather in Paris?", tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert json.loads(call.function.arguments).keys() == {"city"}


def test_answers_are_the_same_after_a_kill_and_without_a_prefill_worker(cluster: Cluster) -> None:
    """The text is longer than the window of 512 tokens."""

    def conversation(cache_salt: str, kill_after: int = 0) -> str:
        text, num_chunks = "", 0
        with cluster.client() as client:
            stream = client.completions.create(
                model=MODEL().stem, prompt="The history of Paris begins " * 150, temperature=0.0, max_tokens=60,
                stream=True, extra_body={"cache_salt": cache_salt, "ignore_eos": True},
            )  # fmt: skip
            for chunk in stream:
                text += chunk.choices[0].text
                num_chunks += 1
                if num_chunks == kill_after:
                    [worker] = [each for each in ("decode-0", "decode-1") if cluster.load_of(each)["running"]]
                    cluster.services[worker].kill()
        return text

    expected = conversation("apart")
    assert conversation("killed", kill_after=10) == expected
    cluster.start_killed()
    cluster.services["prefill-0"].kill()
    assert conversation("together") == expected


def test_turns_continue_from_the_cache(cluster: Cluster) -> None:
    messages: list[Any] = []
    cached: list[int] = []
    with cluster.client() as client:
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            reply: Any = client.chat.completions.create(
                model=MODEL().stem, messages=messages, temperature=0.0, max_tokens=60
            )
            cached.append(reply.usage.prompt_tokens_details.cached_tokens)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    assert cached == sorted(cached)
    assert cached[-1] > 0
