"""Kept and moved requests of a real cluster through HTTP: every answer equals the run without them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from engine import LLM
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.test_failover import Job, expected_texts, stream_job

ENGINE = ("--model=dry-run", "--num-gpu-blocks=1024", "--num-threads=1", "--itl-objective-ms=100")
OBJECTIVES = ("--ttft-objective-ms=1000", "--itl-objective-ms=100")


@pytest.fixture(scope="module")
def reference() -> LLM:
    return LLM("dry-run", num_gpu_blocks=2048, num_threads=1)


@contextlib.contextmanager
def adaptive_cluster(num_prefill: int = 1, num_decode: int = 1) -> Iterator[Cluster]:
    """Decode workers with few seats: what finds none is kept, and moves when prompts come."""
    seats = {"decode": ("--max-num-seqs=4",)}
    with running_cluster(
        num_prefill, num_decode, engine_args=ENGINE, router_args=OBJECTIVES, role_args=seats
    ) as cluster:
        yield cluster


def streams(count: int, seed: int, max_tokens: int = 420) -> list[Job]:
    """Long answers, greedy and seeded."""
    return [
        Job(f"stream {seed} {i} " + "x" * 30, max_tokens, temperature=0.9 * (i % 2), seed=seed + i, priority=0)
        for i in range(count)
    ]


def prompts(count: int, seed: int) -> list[Job]:
    """Long prompts with short answers."""
    return [
        Job(f"prompt {seed} {i} " + "y" * 400, 4, temperature=0.9, seed=seed + i, priority=0) for i in range(count)
    ]


def counted(cluster: Cluster) -> dict[str, float]:
    """Moves, and placements by kind."""
    text = httpx.get(cluster.url + "/metrics", timeout=10).text
    kinds = re.findall(r'mini_infer_placements_total\{.*placement="(\w+)"\} (\S+)', text)
    moves = re.findall(r"mini_infer_moves_total\{.*\} (\S+)", text)
    return {"moves": float(moves[0])} | {kind: float(count) for kind, count in kinds}


async def ask_all(cluster: Cluster, *groups: list[Job]) -> list[str]:
    """The texts; each group is sent a moment after the one before."""
    client = openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=90.0)
    async with client:
        tasks = []
        for group in groups:
            tasks += [asyncio.create_task(stream_job(client, job)) for job in group]
            await asyncio.sleep(0.15)
        return [text for text, _ in await asyncio.gather(*tasks)]


async def run_with_drain(cluster: Cluster, seed: int, kill: str = "") -> tuple[list[Job], list[str]]:
    """Streams of which some are kept, until their prefill workers drain: then those move, and `kill` may die."""
    jobs = streams(24, seed)
    async with (
        openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=90.0) as client,
        httpx.AsyncClient(base_url=cluster.url, timeout=10) as http,
    ):
        tasks = []
        kept = counted(cluster)["kept"]
        for job in jobs:
            tasks.append(asyncio.create_task(stream_job(client, job)))
            await asyncio.sleep(0.01)
            if counted(cluster)["kept"] > kept + 2:
                break
        jobs = jobs[: len(tasks)]
        for worker in ("prefill-0", "prefill-1"):
            await http.post(f"/v1/workers/{worker}/drain?grace_seconds=60&force=true")
        if kill:
            while not counted(cluster)["moves"] and not all(task.done() for task in tasks):
                await asyncio.sleep(0.005)
            cluster.services[kill].kill()
        return jobs, [text for text, _ in await asyncio.gather(*tasks)]


@pytest.mark.timeout(180)
async def test_kept_and_moved_answers_are_equal(reference: LLM) -> None:
    with adaptive_cluster() as cluster:
        await ask_all(cluster, streams(8, 100), prompts(20, 100))  # measures the workers
        jobs, texts = await run_with_drain(cluster, 200)
        assert texts == expected_texts(reference, jobs)
        counts = counted(cluster)
        assert counts["kept"] > 0
        assert counts["moves"] > 0
        cluster.wait_quiet()
        for service in cluster.services.values():
            assert "Traceback" not in service.log(), service.log()[-2000:]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kill", ["prefill-0", "decode-0"])
async def test_a_worker_dies_while_requests_move(reference: LLM, kill: str) -> None:
    with adaptive_cluster(2, 2) as cluster:
        await ask_all(cluster, streams(12, 400), prompts(20, 400))
        jobs, texts = await run_with_drain(cluster, 500, kill)
        assert texts == expected_texts(reference, jobs)
        assert counted(cluster)["moves"] > 0
        cluster.wait_quiet()


@pytest.mark.timeout(120)
async def test_explain_shows_placements_and_predictions() -> None:
    with adaptive_cluster() as cluster:
        await ask_all(cluster, streams(6, 600), prompts(10, 600))
        body = {"model": "dry-run", "prompt": "z" * 300, "max_tokens": 4}
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            response_id = (await client.post("/v1/completions", json=body)).json()["id"]
        [choice] = cluster.get(f"/explain/{response_id}")["choices"]
        [decision] = choice["decisions"]
        assert {candidate["placement"] for candidate in decision["candidates"]} >= {"disaggregated", "local"}
        assert all(candidate["ttft_seconds"] > 0 for candidate in decision["candidates"])
        assert all(candidate["itl_seconds"] > 0 for candidate in decision["candidates"])
        assert decision["chosen"]["violation"] == min(c["violation"] for c in decision["candidates"])
