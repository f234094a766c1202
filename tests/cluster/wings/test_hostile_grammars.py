"""Hostile grammars do not slow down other streams noticeably, and stop no worker."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.harness.clients import async_client
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.processes import children

NUM_STREAMS = 8
NOISE_SECONDS = 0.3  # on a machine that others use: engines, a router and these clients share two cores
KEPT_BYTES = 200 << 20
NO_KEEPALIVE = httpx.Limits(max_keepalive_connections=0)  # a connection that both ends give up at once is an error
BOMB = "(x{1000}){1000}"


def hostile_regex(rng: random.Random) -> str:
    def atom() -> str:
        return rng.choice(["x", "[ab]", r"\w", r"\d", ".", "[^a]", r"\p{L}", "(a|ab|b)", "[a-y]*z?", "(?i:abc)"])

    def many(inner: str) -> str:
        count = rng.choice([5, 20, 200, 1000, 5000])
        return f"({inner})" + rng.choice([f"{{{count}}}", f"{{0,{count}}}", "*", "+", f"{{{count},}}"])

    body = rng.choice(
        [
            many(many(atom())),
            many(many(many(atom()))),
            f"({atom()})*{many(atom())}",
            many(f".*{atom()}"),
            "|".join(many(atom()) for _ in range(30)),
            "(" + "|".join(f"{atom()}*{chr(97 + i % 26)}{{{i * 50}}}" for i in range(30)) + ")*",
            "".join(many(atom()) for _ in range(20)),
        ]
    )
    return rng.choice(["", "harmless: ", r"\d{3}-[a-z]{40} "]) + body


def hostile_schema(rng: random.Random) -> dict[str, Any]:
    count = rng.choice([10, 100, 1000])
    few = range(min(count, 50))
    schema: dict[str, Any] = rng.choice(
        [
            {"type": "string", "pattern": hostile_regex(rng), "maxLength": count},
            {"type": "string", "allOf": [{"pattern": f".*[{chr(97 + i)}].*"} for i in range(rng.randint(2, 22))]},
            {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]},
            {"$ref": "#"},
            {"anyOf": [{"type": "object", "required": [f"p{j}" for j in range(i)]} for i in few]},
            {"enum": ["v" * (i % 50) + str(i) for i in range(count)]},
            {"type": "array", "minItems": count, "items": {"type": "string", "minLength": count * 1000}},
            {"type": "object", "patternProperties": {hostile_regex(rng): {"type": "string"} for _ in range(8)}},
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}{j}": {"maxLength": j}}} for j in range(8)]} for i in range(5)
                ]
            },
            {"type": "integer", "minimum": -(10**30), "maximum": 10**300},
        ]
    )
    if rng.random() < 0.4:  # nothing shows before its second property
        properties = {"harmless": {"type": "string", "minLength": 20}, "hostile": {k: schema[k] for k in schema}}
        return {"type": "object", "properties": properties, "required": [*properties]}
    return schema


def hostile_lark(rng: random.Random) -> str:
    count = rng.choice([20, 100, 400, 1500])
    names = [f"r{i}" for i in range(count)]
    text = rng.choice(
        [
            'start: e\ne: "(" e ")" | e e | /[a-z]/',
            'start: e\ne: e e e | e e | "a"?',
            "\n".join(["start: " + " | ".join(names), *(f'{name}: "a{name}"' for name in names)]),
            "\n".join(["start: r0", *(f'r{i}: r{i + 1} r{i + 1} | "x"' for i in range(count)), f'r{count}: "a"']),
            f'start: ("a"?){{{count}}} "b"',
            f'start: x{{1,{count * 100}}}\nx: /[a-z]/ | /[a-f]+/ | "a"',
            'start: x\nx: "a" x "a" | "a" x | x "a" | ""',
            "start: T\nT: " + " & ".join(f"/(.|\\n)*[{chr(97 + i)}]{{{i % 7 + 1}}}(.|\\n)*/" for i in range(15)),
            f"start: T{{{count}}}\nT: /{hostile_regex(rng)}/",
        ]
    )
    return text.replace("start:", "start: /harmless [a-z]{20} / body\nbody:", 1) if rng.random() < 0.4 else text


def hostile_fields(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    field = ("regex", "json", "grammar")[seed % 3]
    made = {"regex": hostile_regex, "json": hostile_schema, "grammar": hostile_lark}[field](rng)
    return {"structured_outputs": {field: made}}


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.soak)], ids=["one decode worker", "two"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    engine_args = ("--model=dry-run", "--num-gpu-blocks=4096", "--num-threads=1")
    with running_cluster(num_prefill=1, num_decode=request.param, engine_args=engine_args) as running:
        yield running


def engine_bytes(cluster: Cluster) -> dict[str, int]:
    """Return the memory of each engine process."""
    found = {}
    for name, service in cluster.services.items():
        for pid in children(service.pid) if name != "router" else [service.pid]:
            found[f"{name} {pid}"] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return found


async def longest_gap(client: openai.AsyncOpenAI, work: Awaitable[None]) -> float:
    """Return the longest time between two chunks of one of NUM_STREAMS plain streams while the work is done."""
    gaps = [0.0]
    is_over = False

    async def stream(place: int) -> None:
        while not is_over:
            chunks = await client.completions.create(
                model="dry-run", prompt=f"{place}", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            )
            last = time.perf_counter() + 1e9  # until the first chunk
            async for chunk in chunks:
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
                assert chunk.choices[0].finish_reason in (None, "length")
                if is_over:
                    await chunks.close()
                    return

    tasks = [asyncio.create_task(stream(place)) for place in range(NUM_STREAMS)]
    try:
        await asyncio.sleep(0.3)
        await work
    finally:
        is_over = True
        await asyncio.gather(*tasks)
    return max(gaps)


async def ask(client: httpx.AsyncClient, fields: dict[str, Any]) -> tuple[int, str]:
    """Return the answer's status, and the message of a refusal."""
    body = {"model": "dry-run", "prompt": "a", "max_tokens": 80, "temperature": 1.0, "seed": 1, **fields}
    reply = await client.post("/v1/completions", json=body)
    return reply.status_code, reply.json()["error"]["message"] if reply.status_code != 200 else ""


@pytest.mark.parametrize("num_random", [30, pytest.param(100, marks=pytest.mark.soak)])
async def test_hostile_grammars_cost_others_nothing(
    cluster: Cluster, request: pytest.FixtureRequest, num_random: int
) -> None:
    """Loads that once stopped engines, and random ones, compared with as many harmless grammars."""
    first_seed = 100 * request.node.callspec.indices["cluster"]
    loads = [
        [{"structured_outputs": {"regex": f"x{{{i + 1}}}{BOMB}"}} for i in range(12)],
        [{"structured_outputs": {"regex": BOMB}}] * 40,
        [hostile_fields(seed) for seed in range(first_seed, first_seed + num_random)],
    ]
    before, pids = engine_bytes(cluster), {name: service.pid for name, service in cluster.services.items()}
    async with (
        async_client(cluster.url) as streaming,
        httpx.AsyncClient(base_url=cluster.url, timeout=100.0, limits=NO_KEEPALIVE) as client,
    ):
        answers: list[tuple[int, str]] = []

        async def send(load: list[dict[str, Any]]) -> None:
            for first in range(0, len(load), 40):
                answers.extend(await asyncio.gather(*(ask(client, fields) for fields in load[first : first + 40])))

        harmless = [{"structured_outputs": {"regex": f"[a-z]{{{5 + i}}}"}} for i in range(40)]
        usual = await longest_gap(streaming, send(harmless))
        assert {status for status, _ in answers} == {200}
        for load in loads:
            bound = 3 * usual + NOISE_SECONDS
            longest = await longest_gap(streaming, send(load))
            if longest >= bound:  # others took the cores, or it shows again
                longest = await longest_gap(streaming, send(load))
            print(f"longest gap beside {len(load)} grammars: {longest:.3f} s, {usual:.3f} s beside harmless ones")
            assert longest < bound, f"{longest:.3f} s, and {usual:.3f} s without"
    counts = Counter(status for status, _ in answers)
    assert set(counts) == {200, 400}
    assert all("grammar" in message for status, message in answers if status == 400)
    assert {name: service.pid for name, service in cluster.services.items() if service.is_alive()} == pids
    assert all(worker["state"] == "ready" for worker in cluster.get("/v1/cluster")["workers"])
    grown = {name: size - before[name] for name, size in engine_bytes(cluster).items()}
    assert max(grown.values()) < KEPT_BYTES, grown
