"""Requests of a load, their expected answers from one engine, streaming clients, and kills while these stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import openai

from mini_infer import LLM, SamplingParams
from tests.harness.clients import async_client
from tests.harness.cluster import Cluster

T = TypeVar("T")
KILLS = 8  # attempts: on a busy machine most streams may have ended before a kill
StreamAll = Callable[[Callable[[], None]], Awaitable[tuple[T, int]]]
"""Streams all requests concurrently, and calls its argument while some of them are streaming.

Returns the answers, and how many streams moved to another worker.
"""


@dataclass(frozen=True)
class Job:
    """One request of the load; the answer is a function of it."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    priority: int


def make_jobs(count: int, seed: int) -> list[Job]:
    rng = random.Random(seed)
    families = ["the shared beginning of many prompts " * n for n in (0, 2, 6)]
    return [
        Job(
            prompt=rng.choice(families) + f"request {i} " + "x" * rng.randrange(120),
            max_tokens=rng.choice([8, 40, 120, 200]),
            temperature=rng.choice([0.0, 0.9]),
            seed=i,
            priority=rng.randrange(3),
        )
        for i in range(count)
    ]


def expected_texts(llm: LLM, jobs: list[Job]) -> list[str]:
    params = [
        SamplingParams(max_tokens=j.max_tokens, temperature=j.temperature, seed=j.seed, ignore_eos=True) for j in jobs
    ]
    return [completion.text for completion in llm.generate([job.prompt for job in jobs], params)]


async def stream_job(
    client: openai.AsyncOpenAI, job: Job, on_first_token: Callable[[], None] = lambda: None
) -> tuple[str, list[str]]:
    """Stream one request; return its text and finish reasons."""
    stream = await client.completions.create(
        model="dry-run",
        prompt=job.prompt,
        max_tokens=job.max_tokens,
        temperature=job.temperature,
        seed=job.seed,
        stream=True,
        extra_body={"ignore_eos": True, "priority": job.priority},
    )
    text = ""
    reasons: list[str] = []
    async for chunk in stream:
        for choice in chunk.choices:
            if not text and choice.text:
                on_first_token()
            text += choice.text
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    return text, reasons


async def stream_jobs(
    url: str, jobs: Sequence[Job], after_started: int = 0, act: Callable[[], None] = lambda: None
) -> list[tuple[str, list[str]]]:
    """Stream all concurrently. act: called when `after_started` have a first token; a quarter must be open then."""
    num_started, num_open = 0, 0

    def on_first_token() -> None:
        nonlocal num_started, num_open
        num_started += 1
        if num_started == after_started:
            act()
            num_open = sum(not task.done() for task in tasks)

    async with async_client(url) as client:
        tasks = [asyncio.create_task(stream_job(client, job, on_first_token)) for job in jobs]
        answers = await asyncio.gather(*tasks)
    assert not after_started or num_open > len(jobs) // 4, "it came too late to mean anything"
    return answers


def texts(answers: Sequence[tuple[str, list[str]]]) -> list[str]:
    return [text for text, _ in answers]


@dataclass
class Kills:
    """Each of the first `most` calls kills the busiest decode worker, which is restarted if `most` > 1."""

    cluster: Cluster
    most: int
    count: int = 0

    def __call__(self) -> None:
        if self.count == self.most:
            return
        name = self.cluster.kill_busiest_decode()
        if name:
            self.count += 1
            if self.most > 1:
                self.cluster.start_service(name)


async def same_after_a_kill(
    cluster: Cluster, stream_all: StreamAll[T], least_moved: int = 1, num_kills: int = 1
) -> T:
    """Check that answers are the same after kills that move at least `least_moved` streams; return the answers."""
    calm, _ = await stream_all(lambda: None)
    for _ in range(KILLS):
        kills = Kills(cluster, num_kills)
        hurt, num_moved = await stream_all(kills)
        assert hurt == calm
        if num_moved >= least_moved and kills.count == num_kills:
            return calm
        await asyncio.to_thread(cluster.start_killed)
    raise AssertionError("every kill came too late to mean anything")
