"""A cluster with one decode worker, the default: its death costs its streams time and nothing else."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from mini_infer import LLM
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.jobs import expected_texts, make_jobs, stream_jobs
from tests.harness.waiting import until


async def run_round(cluster: Cluster, reference: LLM, num_streams: int, seed: int) -> None:
    """Run all streams at once; SIGKILL the only decode worker at a random token. It is restarted at once."""
    jobs = make_jobs(num_streams, seed)
    expected = await asyncio.to_thread(expected_texts, reference, jobs)
    kill_at = random.Random(seed).randrange(1, num_streams // 2)

    def kill() -> None:
        cluster.services["decode-0"].kill()
        cluster.start_service("decode-0")

    answers = await stream_jobs(cluster.url, jobs, kill_at, kill)
    assert [reasons for _, reasons in answers] == [["length"]] * num_streams
    wrong = [index for index, (text, _) in enumerate(answers) if text != expected[index]]
    assert not wrong, f"{len(wrong)} answers differ, first: {wrong[:5]}"
    await until(lambda: (True, seed + 1) in told(cluster)["workers"], message=lambda: told(cluster))


def told(cluster: Cluster) -> dict[str, Any]:
    """Return the router's running and waiting requests, and for each worker whether it decodes and its losses."""
    found = cluster.get("/v1/cluster")
    workers = [(worker["id"] == "decode-0", worker["times_lost"]) for worker in found["workers"]]
    return {"requests": found["running"] + found["waiting"], "workers": workers}


@pytest.mark.parametrize(
    ("num_streams", "num_rounds"),
    [(16, 1), pytest.param(200, 10, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
async def test_streams_survive_the_death_of_the_only_decode_worker(
    reference: LLM, num_streams: int, num_rounds: int
) -> None:
    with running_cluster(with_agent=True) as cluster:
        for seed in range(num_rounds):
            await run_round(cluster, reference, num_streams, seed)
            print(f"round {seed + 1}: {num_streams} streams, 0 lost, bytes equal", flush=True)
        await until(lambda: not told(cluster)["requests"], message=lambda: told(cluster))
