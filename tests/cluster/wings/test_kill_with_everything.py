"""Decode workers are killed among streams of all kinds at once: drafts, adapters, schemas, tool calls, n = 2.

`pytest -s -m soak tests/cluster/wings/test_kill_with_everything.py`: 200 streams, 20 kills, and 20 starts among them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai.types.chat.chat_completion_chunk import Choice

from engine.loader.random_weights import DRY_RUN_CONFIG
from tests.harness.adapters import shapes_of_config, write_adapter
from tests.harness.clients import async_client
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.jobs import same_after_a_kill

pytestmark = [
    pytest.mark.wing("engine.lora"), pytest.mark.wing("engine.speculation"), pytest.mark.wing("engine.grammar")
]  # fmt: skip
ENGINE = (  # float32 would give the same tokens, and log-probabilities that are equal to rounding
    "--model=dry-run", "--dtype=bfloat16", "--num-gpu-blocks=2048", "--num-threads=1", "--enable-lora",
    "--speculative=suffix", "--no-adaptive-drafts",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": SCHEMA, "strict": True}}]
NAMED = {"type": "function", "function": {"name": "lookup"}}
PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"model": "poet"},
    {"response_format": PERSON},
    {"tools": TOOLS, "tool_choice": "required"},
    {"n": 2},
    {"model": "critic", "response_format": PERSON, "n": 2},
    {"model": "poet", "tools": TOOLS, "tool_choice": NAMED},
    {"logprobs": True, "top_logprobs": 3, "frequency_penalty": 0.5},
)


@dataclass
class Streamed:
    """One choice: chunks depend on steps, their sum does not."""

    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)  # name and arguments
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: Choice) -> None:
        self.text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            found = self.calls.setdefault(call.index, ["", ""])
            if call.function is not None:
                found[0] += call.function.name or ""
                found[1] += call.function.arguments or ""
        if choice.logprobs is not None:
            self.logprobs += [token.model_dump() for token in choice.logprobs.content or ()]
        self.finish_reason = choice.finish_reason or self.finish_reason


Answer = tuple[list[Streamed], tuple[int, int]]  # choices; tokens of the prompt and of all choices


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, shapes = tmp_path_factory.mktemp("adapters"), shapes_of_config(DRY_RUN_CONFIG)
    adapters = [
        f"{name}={write_adapter(folder / name, shapes, ('_proj',), seed=seed, std=0.3)}"
        for seed, name in enumerate(("poet", "critic"))
    ]
    modules = f"--lora-modules={' '.join(adapters)}"
    router_args = (modules, "--max-retries=20")  # a stream may lose several workers before its next token
    with running_cluster(1, 2, engine_args=(*ENGINE, modules), router_args=router_args) as running:
        yield running


@pytest.mark.parametrize(("count", "num_kills"), [(16, 1), pytest.param(200, 20, marks=pytest.mark.soak)])
@pytest.mark.asyncio
async def test_the_same_bytes_after_kills(cluster: Cluster, count: int, num_kills: int) -> None:
    rng = random.Random(count)
    after = [rng.randrange(1, 80) for _ in range(count)]  # chunks of a stream, when it asks for a kill

    names: list[str] = []  # of the last requests

    async def stream_all(kill: Callable[[], None]) -> tuple[list[Answer], int]:
        found = await asyncio.gather(*(stream(number, kill) for number in range(count)))
        names[:] = [name for _, name in found]
        num_moved = cluster.num_migrations(names)
        print(f"{count} streams, their choices moved {num_moved} times")
        return [answer for answer, _ in found], num_moved

    async def stream(number: int, kill: Callable[[], None]) -> tuple[Answer, str]:
        choices: dict[int, Streamed] = defaultdict(Streamed)
        num_chunks, name, usage = 0, "", None
        async for chunk in await client.chat.completions.create(**asked(number)):
            name, num_chunks, usage = chunk.id, num_chunks + 1, chunk.usage
            for choice in chunk.choices:
                choices[choice.index].add(choice)
            if num_chunks == after[number] and number % 5 == 0:
                kill()
        assert usage is not None
        return ([choices[index] for index in sorted(choices)], (usage.prompt_tokens, usage.completion_tokens)), name

    async with async_client(cluster.url) as client:
        answers = await same_after_a_kill(cluster, stream_all, least_moved=count // 10, num_kills=num_kills)
    check_answers(answers)
    explained = [choice for name in names for choice in cluster.get(f"/explain/{name}")["choices"]]
    assert sum(choice["accepted_draft_tokens"] for choice in explained) > count


def asked(number: int) -> dict[str, Any]:
    kind = KINDS[number % len(KINDS)]
    has_grammar = "tools" in kind or "response_format" in kind
    return {
        "model": "dry-run",
        "messages": [{"role": "user", "content": f"request {number} " * (1 + number % 7)}],
        "max_tokens": 160,
        "temperature": 0.9 if number // len(KINDS) % 2 else 0.0,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {} if has_grammar else {"ignore_eos": True, "allowed_token_ids": [97, 98, 99, 100]},
        **kind,
    }


def check_answers(answers: list[Answer]) -> None:
    for number, (choices, (num_prompt_tokens, num_tokens)) in enumerate(answers):
        kind = KINDS[number % len(KINDS)]
        assert len(choices) == kind.get("n", 1)
        assert min(num_prompt_tokens, num_tokens) > 0
        for choice in choices:
            assert len(choice.logprobs) == (num_tokens if "logprobs" in kind else 0)
            if choice.finish_reason == "length":
                assert choice.text or choice.calls
            elif "tools" in kind:
                [(name, arguments)] = choice.calls.values()
                assert name == "lookup"
                assert isinstance(json.loads(arguments)["ages"], list)
            else:
                assert isinstance(json.loads(choice.text)["ages"], list)
