"""Kept and moved requests of a real cluster through HTTP: every answer equals the run without them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from engine import LLM
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.test_failover import Job, expected_texts, run_load, stream_job

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


def explained_moves(cluster: Cluster, response_id: str) -> list[dict[str, Any]]:
    [choice] = cluster.get(f"/explain/{response_id}")["choices"]
    return [decision for decision in choice["decisions"] if decision["policy"] == "move"]


@pytest.mark.timeout(180)
async def test_kept_and_moved_answers_are_equal(reference: LLM) -> None:
    with adaptive_cluster() as cluster:
        for seed in (100, 200, 300):  # the first round measures the workers
            shorter = streams(6, seed + 20, max_tokens=150)
            groups = shorter, streams(8, seed), prompts(40, seed), prompts(40, seed + 50)
            jobs = [job for group in groups for job in group]
            assert await ask_all(cluster, *groups) == expected_texts(reference, jobs)
        counts = counted(cluster)
        assert counts["kept"] > 0
        assert counts["moves"] > 0
        assert counts["local"] + counts["disaggregated"] > 0
        cluster.wait_quiet()
        for service in cluster.services.values():
            assert "Traceback" not in service.log(), service.log()[-2000:]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kill", ["prefill-0", "decode-0"])
async def test_a_worker_dies_while_requests_move(reference: LLM, kill: str) -> None:
    with adaptive_cluster(2, 2) as cluster:
        warm = streams(12, 400), prompts(20, 400)
        await ask_all(cluster, *warm)
        jobs = streams(24, 500) + prompts(60, 500)
        answers = await run_load(cluster, jobs, kill, after_started=40)
        assert [text for text, _ in answers] == expected_texts(reference, jobs)
        assert counted(cluster)["kept"] > 0
        assert len(cluster.wait_quiet()) == 3


@pytest.mark.timeout(120)
async def test_explain_shows_predictions_and_moves(reference: LLM) -> None:
    with adaptive_cluster() as cluster:
        await ask_all(cluster, streams(6, 600), prompts(10, 600))
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:

            async def ask(job: Job) -> str:
                body = {"model": "dry-run", "prompt": job.prompt, "max_tokens": job.max_tokens, "ignore_eos": True}
                return str((await client.post("/v1/completions", json=body)).json()["id"])

            tasks = [asyncio.create_task(ask(job)) for job in streams(10, 700)]
            await asyncio.sleep(0.6)
            tasks += [asyncio.create_task(ask(job)) for job in prompts(60, 700)]
            ids = await asyncio.gather(*tasks)
        moves = [move for response_id in ids for move in explained_moves(cluster, response_id)]
        assert len(moves) > 0
        for move in moves:
            chosen = move["chosen"]
            assert (chosen["prefill"], chosen["decode"]) == ("prefill-0", "decode-0")
            assert chosen["terms_seconds"]["stay"] > chosen["cost_seconds"]
        [choice] = cluster.get(f"/explain/{ids[0]}")["choices"]
        first = choice["decisions"][0]
        assert {candidate["placement"] for candidate in first["candidates"]} >= {"disaggregated", "local"}
        assert all(candidate["ttft_seconds"] > 0 for candidate in first["candidates"])
