"""Stopped processes leave the rotation within seconds, come back, and lose nothing; starved ones stay."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mini_infer import LLM
from tests.harness.clients import async_client
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.jobs import expected_texts, make_jobs, stream_job, stream_jobs, texts
from tests.harness.processes import children, until_stopped
from tests.harness.waiting import until

OUT_SECONDS = 5.0
BUSY_LOOP = "print(flush=True)\nwhile True: pass"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(num_prefill=0, num_decode=2) as running:
        yield running


def state_of(cluster: Cluster, worker: str) -> str:
    """`connecting` is how a worker shows that cannot be reached, or that refuses streams."""
    known = {item["id"]: item["state"] for item in cluster.get("/v1/cluster")["workers"]}
    return known.get(worker, "connecting")


async def stop_for_a_while(cluster: Cluster, reference: LLM, who: str) -> float:
    """SIGSTOP parts of a worker under load; return the seconds until it was out of rotation."""
    front = cluster.services["decode-0"].pid
    pids = {"engine": children(front), "front": [front], "both": [front, *children(front)]}[who]
    jobs = make_jobs(12, seed=5)
    expected = expected_texts(reference, jobs)
    async with async_client(cluster.url) as client:
        streams = [asyncio.create_task(stream_job(client, job)) for job in jobs]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            for pid in pids:
                until_stopped(pid)
            began = time.monotonic()
            await until(lambda: state_of(cluster, "decode-0") != "ready")
            out_after = time.monotonic() - began
            answers = await asyncio.gather(*streams)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    assert texts(answers) == expected
    await until(lambda: state_of(cluster, "decode-0") == "ready")
    await asyncio.to_thread(cluster.wait_quiet)
    return out_after


async def stop_in_time(cluster: Cluster, reference: LLM, who: str) -> list[float]:
    """Stop it until it was out in time. A busy machine is late now and then: one of three times is enough."""
    seconds: list[float] = []
    while not seconds or (seconds[-1] >= OUT_SECONDS and len(seconds) < 3):
        seconds.append(await stop_for_a_while(cluster, reference, who))
    assert seconds[-1] < OUT_SECONDS, seconds
    return seconds


@pytest.mark.parametrize("who", ["engine", "front"])
async def test_a_stopped_process_is_out_within_seconds_and_nothing_is_lost(
    cluster: Cluster, reference: LLM, who: str
) -> None:
    await stop_in_time(cluster, reference, who)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("who", ["engine", "front", "both"])
async def test_twenty_stops(cluster: Cluster, reference: LLM, who: str) -> None:
    seconds: list[float] = []
    for _ in range(20):
        seconds += await stop_in_time(cluster, reference, who)
    seconds.sort()
    print(f"{who}: out after {seconds[0]:.2f} to {seconds[-1]:.2f} s, median {seconds[len(seconds) // 2]:.2f} s")


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Start each in its own session, so that the kernel gives each as much as the whole cluster's processes."""
    loops = [
        subprocess.Popen([sys.executable, "-c", BUSY_LOOP], stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(count)
    ]
    try:
        for loop in loops:
            assert loop.stdout is not None
            loop.stdout.readline()
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


async def starve(cluster: Cluster, reference: LLM, num_loops: int, seconds: float, num_streams: int) -> int:
    """Send bursts of streams during busy loops; return how many answers were right. None may be wrong or lost."""
    num_right = 0
    deadline = time.monotonic() + seconds
    with busy_loops(num_loops):
        seed = 100
        while time.monotonic() < deadline:
            seed += 1
            jobs = make_jobs(num_streams, seed)
            assert texts(await stream_jobs(cluster.url, jobs)) == expected_texts(reference, jobs)
            num_right += num_streams
    return num_right


async def test_a_starved_cluster_raises_no_alarm(cluster: Cluster, reference: LLM) -> None:
    await starve_without_alarm(cluster, reference, num_loops=8, seconds=3.0, num_streams=16)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_ten_minutes_beside_twenty_busy_loops(reference: LLM) -> None:
    with running_cluster(num_prefill=1, num_decode=1) as cluster:  # the default, whose one decode worker must hold
        await starve_without_alarm(cluster, reference, num_loops=20, seconds=600.0, num_streams=64)


async def starve_without_alarm(
    cluster: Cluster, reference: LLM, num_loops: int, seconds: float, num_streams: int
) -> None:
    before = cluster.get("/v1/cluster")["workers"]
    num_right = await starve(cluster, reference, num_loops, seconds, num_streams)
    assert num_right > 0
    print(f"{num_right} streams beside {num_loops} busy loops in {seconds:.0f} s: none wrong, none lost")
    after = cluster.get("/v1/cluster")["workers"]
    assert [worker["times_lost"] for worker in after] == [worker["times_lost"] for worker in before]
    assert all(worker["state"] == "ready" for worker in after)
