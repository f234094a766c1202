"""Kept and moved requests of a real cluster through HTTP: every answer equals the run without them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import httpx
import pytest

from mini_infer import LLM
from tests.harness.clients import async_client
from tests.harness.cluster import SHORT_LEASES, Cluster, running_cluster
from tests.harness.jobs import Job, expected_texts, stream_job

ENGINE = ("--model=dry-run", "--num-gpu-blocks=1024", "--num-threads=1", "--itl-objective-ms=100")
OBJECTIVES = ("--ttft-objective-ms=1000", "--itl-objective-ms=100")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start decode workers with few seats: a request without one is kept, and moves when prompts arrive."""
    seats = {"decode": ("--max-num-seqs=4",)}
    with running_cluster(
        2, 2, engine_args=ENGINE, worker_args=SHORT_LEASES, router_args=OBJECTIVES, role_args=seats
    ) as running:
        yield running


def streams(count: int, seed: int, max_tokens: int = 420) -> list[Job]:
    """Make requests with long answers, greedy and seeded."""
    return [
        Job(f"stream {seed} {i} " + "x" * 30, max_tokens, temperature=0.9 * (i % 2), seed=seed + i, priority=0)
        for i in range(count)
    ]


def prompts(count: int, seed: int) -> list[Job]:
    """Make requests with long prompts and short answers."""
    return [
        Job(f"prompt {seed} {i} " + "y" * 400, 4, temperature=0.9, seed=seed + i, priority=0) for i in range(count)
    ]


async def counted(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the numbers of moves, and of placements by kind."""
    text = (await http.get("/metrics")).text
    kinds = re.findall(r'mini_infer_placements_total\{.*placement="(\w+)"\} (\S+)', text)
    moves = re.findall(r"mini_infer_moves_total\{.*\} (\S+)", text)
    return {"moves": float(moves[0])} | {kind: float(count) for kind, count in kinds}


async def ask_all(cluster: Cluster, *groups: list[Job]) -> list[str]:
    """Return the texts; each group is sent a moment after the previous one."""
    async with async_client(cluster.url) as client:
        tasks = []
        for group in groups:
            tasks += [asyncio.create_task(stream_job(client, job)) for job in group]
            await asyncio.sleep(0.15)
        return [text for text, _ in await asyncio.gather(*tasks)]


async def run_with_drain(cluster: Cluster, seed: int, kill: str = "") -> tuple[list[Job], list[str], float]:
    """Run streams until one is kept; then drain prefill workers, so that it moves; `kill` may be killed.

    Returns the jobs, their texts and the number of moves.
    """
    async with async_client(cluster.url) as client, httpx.AsyncClient(base_url=cluster.url, timeout=100) as http:
        before = await counted(http)
        jobs: list[Job] = []
        tasks: list[asyncio.Task[tuple[str, list[str]]]] = []
        for job in streams(150, seed):
            jobs.append(job)
            tasks.append(asyncio.create_task(stream_job(client, job)))
            await asyncio.sleep(0.005)
            if (await counted(http))["kept"] > before["kept"]:
                break
        names = [name for name in cluster.services if name.startswith("prefill")]
        for name in names:
            await http.post(f"/v1/workers/{name}/drain?grace_seconds=60&force=true")
        while kill and (await counted(http))["moves"] == before["moves"] and not all(task.done() for task in tasks):
            await asyncio.sleep(0.005)
        if kill:
            cluster.services[kill].kill()
        texts = [text for text, _ in await asyncio.gather(*tasks)]
        return jobs, texts, (await counted(http))["moves"] - before["moves"]


async def check_explanation(cluster: Cluster) -> None:
    """Check placements and predictions of a request, on workers that have been measured."""
    body = {"model": "dry-run", "prompt": "z" * 300, "max_tokens": 4}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=100) as client:
        response_id = (await client.post("/v1/completions", json=body)).json()["id"]
    [choice] = cluster.get(f"/explain/{response_id}")["choices"]
    [decision] = choice["decisions"]
    assert {candidate["placement"] for candidate in decision["candidates"]} >= {"disaggregated", "local"}
    assert all(candidate["ttft_seconds"] > 0 for candidate in decision["candidates"])
    assert all(candidate["itl_seconds"] > 0 for candidate in decision["candidates"])
    assert decision["chosen"]["violation"] == min(c["violation"] for c in decision["candidates"])


@pytest.mark.parametrize("kill", ["", pytest.param("prefill-0", marks=pytest.mark.soak), "decode-0"])
async def test_kept_and_moved_answers_are_equal_also_when_a_worker_dies(
    cluster: Cluster, reference: LLM, kill: str
) -> None:
    """Answers are right in every attempt. If a kept request ends before it could move, it is repeated."""
    for attempt in range(8):
        await asyncio.to_thread(cluster.start_killed)
        await ask_all(cluster, streams(8, 100), prompts(20, 100))  # measures the workers
        if not kill:
            await check_explanation(cluster)
        jobs, texts, num_moves = await run_with_drain(cluster, 200 + 200 * attempt, kill)
        assert texts == expected_texts(reference, jobs)
        cluster.wait_quiet()
        for service in cluster.services.values():
            assert "AssertionError" not in service.log(), service.log()[-2000:]
        async with asyncio.timeout(100):  # what has drained ends
            while any(service.is_alive() for name, service in cluster.services.items() if name.startswith("prefill")):
                await asyncio.sleep(0.02)
        if num_moves:
            return
    pytest.fail("nothing ever moved")
