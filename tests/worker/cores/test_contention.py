"""Fewer threads while other programs use the cores, and all of them again afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from worker.cores.contention import MAX_RETRY_SECONDS, OBSERVE_SECONDS, RunQueueWait, ThreadLimit


def run(limit: ThreadLimit, seconds: float, lacking: float, num_threads: int = 2, start: float = 0.0) -> list[int]:
    """Return the threads used in each interval, on a machine that has `lacking` cores too few for all of them."""
    used = []
    for step in range(int(seconds / OBSERVE_SECONDS)):
        count = limit.apply(num_threads)
        limit.observe(start + step * OBSERVE_SECONDS, count, lacking if count > num_threads - lacking else 0.0)
        used.append(count)
    return used


def test_all_threads_are_used_on_a_quiet_machine() -> None:
    assert set(run(ThreadLimit(), 60.0, lacking=0.0, num_threads=8)) == {8}


def test_contention_takes_the_threads_that_lack_a_core() -> None:
    assert ThreadLimit().apply(2) == 2
    used = run(ThreadLimit(), 600.0, lacking=1.0)
    assert used.count(2) < len(used) * 0.03  # tries with all of them become rare
    assert used[1] == 1
    assert set(run(ThreadLimit(), 60.0, lacking=3.0, num_threads=16)) == {13, 16}


def test_threads_come_back_when_the_machine_is_quiet_again() -> None:
    limit = ThreadLimit()
    run(limit, 600.0, lacking=1.0)
    used = run(limit, 2 * MAX_RETRY_SECONDS, lacking=0.0, start=600.0)
    assert used[-1] == 2
    run(limit, 1.0, lacking=1.0, start=700.0)
    assert run(limit, 2.0, lacking=0.0, start=701.0)[-1] == 2  # patience was restored, too


def test_waiting_for_a_core_is_measured() -> None:
    """Three spinning processes for each core: this one waits for most of the time."""
    cores = sorted(os.sched_getaffinity(0))
    spin = "import os, sys\nos.sched_setaffinity(0, [int(sys.argv[1])])\nprint(flush=True)\nwhile True: pass"
    others = []
    try:
        os.sched_setaffinity(0, cores[:1])
        for _ in range(3):
            command = [sys.executable, "-c", spin, str(cores[0])]
            others.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        wait = RunQueueWait()
        shares = []
        deadline = time.monotonic() + 60
        while len(shares) < 2 and time.monotonic() < deadline:
            share = wait.share_since_last(time.monotonic())
            shares += [] if share is None else [share]
        assert max(shares) > 0.2
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.communicate()
