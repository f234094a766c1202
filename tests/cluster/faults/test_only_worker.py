"""`mini-infer serve` as it is by default has one decode worker: its death costs its streams time and nothing else."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import httpx
import pytest

from engine import LLM
from tests.harness.jobs import expected_texts, make_jobs, stream_jobs
from tests.harness.processes import command_line
from tests.harness.served import Served, tmp_path  # noqa: F401
from tests.harness.waiting import until


def decode_fronts(served: Served) -> list[int]:
    """One, or none until the supervisor has started another."""
    return [pid for pid in served.pids if " decode_service " in command_line(pid)][:1]


async def run_round(served: Served, reference: LLM, num_streams: int, seed: int) -> None:
    """All streams at once, and SIGKILL for the only decode worker at a random token."""
    jobs = make_jobs(num_streams, seed)
    expected = await asyncio.to_thread(expected_texts, reference, jobs)
    kill_at = random.Random(seed).randrange(1, num_streams // 2)
    [victim] = decode_fronts(served)
    answers = await stream_jobs(served.url, jobs, kill_at, lambda: os.kill(victim, signal.SIGKILL))
    await until(lambda: decode_fronts(served) not in ([], [victim]))
    assert [reasons for _, reasons in answers] == [["length"]] * num_streams
    wrong = [index for index, (text, _) in enumerate(answers) if text != expected[index]]
    assert not wrong, f"{len(wrong)} answers differ, first: {wrong[:5]}"


async def survive(folder: Path, reference: LLM, num_streams: int, num_rounds: int) -> None:
    served = Served(folder)
    try:
        await asyncio.to_thread(served.wait_for, "stop with Ctrl-C")
        for seed in range(num_rounds):
            await run_round(served, reference, num_streams, seed)
            print(f"round {seed + 1}: {num_streams} streams, 0 lost, bytes equal", flush=True)
        async with asyncio.timeout(60), httpx.AsyncClient(base_url=served.url, timeout=60.0) as http:
            while (state := (await http.get("/v1/cluster")).json())["running"] or state["waiting"]:
                await asyncio.sleep(0.05)
    finally:
        served.stop()


async def test_streams_survive_the_death_of_the_only_decode_worker(tmp_path: Path, reference: LLM) -> None:  # noqa: F811
    await survive(tmp_path, reference, num_streams=16, num_rounds=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_200_streams_and_ten_deaths(tmp_path: Path, reference: LLM) -> None:  # noqa: F811
    await survive(tmp_path, reference, num_streams=200, num_rounds=10)
