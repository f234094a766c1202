"""A decode worker is killed among streams of all kinds at once: drafts, adapters, schemas, tool calls, n = 2."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.loader.random_weights import DRY_RUN_CONFIG
from tests.harness.adapters import shapes_of_config, write_adapter
from tests.harness.clients import async_client
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.jobs import same_after_a_kill

pytestmark = [
    pytest.mark.wing("engine.lora"), pytest.mark.wing("engine.speculation"), pytest.mark.wing("engine.grammar")
]  # fmt: skip
ENGINE = (
    "--model=dry-run", "--num-gpu-blocks=2048", "--num-threads=1", "--enable-lora", "--speculative=suffix",
    "--no-adaptive-drafts",
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
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"model": "poet"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}},
    {"tools": TOOLS, "tool_choice": "required"},
    {"n": 2},
)
Streamed = list[tuple[str, str, str | None]]  # of each choice: text, arguments, finish reason


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    poet = write_adapter(
        tmp_path_factory.mktemp("adapters") / "poet", shapes_of_config(DRY_RUN_CONFIG), ("_proj",), seed=1, std=0.3
    )
    modules = f"--lora-modules=poet={poet}"
    with running_cluster(1, 2, engine_args=(*ENGINE, modules), router_args=(modules,)) as running:
        yield running


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.asyncio
async def test_the_same_bytes_after_a_kill(cluster: Cluster, count: int) -> None:
    rng = random.Random(count)
    after = [rng.randrange(1, 40) for _ in range(count)]  # chunks of a stream, when it asks for the kill

    names: list[str] = []  # of the last requests

    async def stream_all(kill: Callable[[], None]) -> tuple[list[Streamed], int]:
        found = await asyncio.gather(*(stream(number, kill) for number in range(count)))
        names[:] = [name for _, name in found]
        return [streamed for streamed, _ in found], cluster.num_migrations(names)

    async def stream(number: int, kill: Callable[[], None]) -> tuple[Streamed, str]:
        choices: dict[int, list[Any]] = defaultdict(lambda: ["", "", None])
        num_chunks, name = 0, ""
        async for chunk in await client.chat.completions.create(**asked(number)):
            name, num_chunks = chunk.id, num_chunks + 1
            for choice in chunk.choices:
                found, delta = choices[choice.index], choice.delta
                found[0] += delta.content or ""
                found[1] += "".join(call.function.arguments or "" for call in delta.tool_calls or () if call.function)
                found[2] = choice.finish_reason or found[2]
            if num_chunks == after[number] and number % 5 == 0:
                kill()
        return [tuple(choices[index]) for index in sorted(choices)], name

    async with async_client(cluster.url) as client:
        answers = await same_after_a_kill(cluster, 3, stream_all, least_moved=count // 10)
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
        "temperature": 0.9 if number % 2 else 0.0,
        "seed": number,
        "stream": True,
        "extra_body": {} if has_grammar else {"ignore_eos": True, "allowed_token_ids": [97, 98, 99, 100]},
        **kind,
    }


def check_answers(answers: list[Streamed]) -> None:
    for number, streamed in enumerate(answers):
        kind = KINDS[number % len(KINDS)]
        assert len(streamed) == kind.get("n", 1)
        for text, arguments, reason in streamed:
            if "tools" in kind and reason == "tool_calls":
                assert isinstance(json.loads(arguments)["ages"], list)
            elif "response_format" in kind and reason == "stop":
                assert isinstance(json.loads(text)["ages"], list)
            else:
                assert reason == "length"
                assert text or arguments
