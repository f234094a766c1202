"""SIGKILL of workers under load: every answer equals the run without it, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from engine import LLM, SamplingParams
from tests.cluster.harness import Cluster, running_cluster
from tests.kvstore.helpers import shm_names, wait_until

NUM_REQUESTS = 100


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


@pytest.fixture(scope="module")
def reference() -> LLM:
    return LLM("dry-run", num_gpu_blocks=2048, num_threads=1)


def expected_texts(llm: LLM, jobs: list[Job]) -> list[str]:
    params = [
        SamplingParams(max_tokens=j.max_tokens, temperature=j.temperature, seed=j.seed, ignore_eos=True) for j in jobs
    ]
    return [completion.text for completion in llm.generate([job.prompt for job in jobs], params)]


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with running_cluster(num_prefill=2, num_decode=2) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """All workers run: those that the test before has killed are started again."""
    shared.start_killed(4)
    return shared


async def stream_job(
    client: openai.AsyncOpenAI, job: Job, on_first_token: Callable[[], None] = lambda: None
) -> tuple[str, list[str]]:
    """Text and finish reasons of one streamed request."""
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


async def run_load(cluster: Cluster, jobs: list[Job], kill: str, after_started: int) -> list[tuple[str, list[str]]]:
    """All jobs at once; `kill` gets SIGKILL in the moment when so many of them have their first token."""
    num_started, num_open_at_kill = 0, 0

    def on_first_token() -> None:
        nonlocal num_started, num_open_at_kill
        num_started += 1
        if num_started == after_started:
            cluster.services[kill].kill()
            num_open_at_kill = sum(not task.done() for task in tasks)

    client = openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=200.0)
    async with client:
        tasks = [asyncio.create_task(stream_job(client, job, on_first_token)) for job in jobs]
        answers = await asyncio.gather(*tasks)
    assert not cluster.services[kill].is_alive()
    assert num_open_at_kill > len(jobs) // 4, "the kill came too late to mean anything"
    return answers


@pytest.mark.parametrize("kill", ["decode-0", "prefill-0"])
async def test_100_requests_survive_a_killed_worker(cluster: Cluster, reference: LLM, kill: str) -> None:
    jobs = make_jobs(NUM_REQUESTS, seed=1 if kill == "decode-0" else 4)  # no prompt that a cache has
    expected = expected_texts(reference, jobs)
    shm_before = shm_names()
    rank = _children(cluster.services[kill].pid)
    answers = await run_load(cluster, jobs, kill, after_started=30)
    assert [reasons for _, reasons in answers] == [["length"]] * NUM_REQUESTS
    wrong = [i for i, (text, _) in enumerate(answers) if text != expected[i]]
    assert not wrong, f"{len(wrong)} answers differ, first: {wrong[:5]}"
    workers = cluster.wait_quiet()
    assert len(workers) == 3
    wait_until(lambda: shm_names() <= shm_before)
    await _gone(rank)
    for service in cluster.services.values():
        assert "AssertionError" not in service.log(), service.log()[-2000:]


async def test_a_killed_worker_comes_back(cluster: Cluster, reference: LLM) -> None:
    """Restarted at the same address it is used again, and old handles are refused by epoch."""
    jobs = make_jobs(40, seed=2)
    expected = expected_texts(reference, jobs)
    answers = await run_load(cluster, jobs, "decode-1", after_started=10)
    assert [text for text, _ in answers] == expected
    cluster.start_service("decode-1")
    await asyncio.to_thread(cluster.wait_ready, 4)
    answers = await run_load(cluster, jobs, "decode-0", after_started=10)
    assert [text for text, _ in answers] == expected


async def test_all_prefill_workers_gone_decode_prefills(cluster: Cluster, reference: LLM) -> None:
    jobs = make_jobs(20, seed=3)
    expected = expected_texts(reference, jobs)
    for name in ("prefill-0", "prefill-1"):
        cluster.services[name].kill()
    client = openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=200.0)
    async with client:
        answers = await asyncio.gather(*(stream_job(client, job) for job in jobs))
    assert [text for text, _ in answers] == expected


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def _gone(pids: list[int], seconds: float = 60.0) -> None:
    """The dead worker's rank ends by itself."""
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a rank outlives its worker"
        await asyncio.sleep(0.05)
