"""A silent engine process: a stopped, blocked or spinning one ends its worker soon, a starved one never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.config import from_args
from common.errors import ConfigError, UnavailableError
from engine.config import EngineConfig, GpuConfig
from tests.harness.waiting import wait_until
from tests.worker.front.test_engine_client import start_instead
from worker.config import WorkerConfig
from worker.front.engine_client import EngineClient
from worker.hangs import engine_watch
from worker.hangs.liveness import (
    BLOCKED_SECONDS,
    STOPPED_SECONDS,
    ProgressWatch,
    StartWatch,
    Threads,
    ThreadSample,
    Work,
    sample_process,
    sample_work,
)
from worker.messages import Start

INTERVAL = 0.25
STALL_SECONDS = 4.0


def seconds_until_out(samples: Iterator[Threads], limit: float = 20.0) -> float | None:
    """Return how long a silent process stays in service; None: for ever."""
    watch = ProgressWatch(STALL_SECONDS)
    assert watch.has_beaten(1)
    elapsed = 0.0
    while elapsed < limit:
        assert not watch.has_beaten(1)
        elapsed += INTERVAL
        if watch.observe(next(samples), INTERVAL):
            return elapsed
    return None


def process(state: str, run_share: float = 0.0, wait_share: float = 0.0) -> Iterator[Threads]:
    """Make a process of an idle thread and one with this state, running and waiting for these parts of a second."""
    now = 0.0
    idle = "T" if state == "T" else "S"
    while True:
        busy = ThreadSample(state, now * run_share, now * wait_share)
        yield {"1": busy, "2": ThreadSample(idle, 0.0, 0.0)}
        now += INTERVAL


@pytest.mark.parametrize(
    ("samples", "seconds"),
    [
        (process("T"), STOPPED_SECONDS),
        (process("S"), BLOCKED_SECONDS),
        (process("D"), BLOCKED_SECONDS),
        (process("R", run_share=1.0), STALL_SECONDS),
        (process("R", run_share=0.5), 2 * STALL_SECONDS),  # only the time on a core counts
        (process("R"), None),  # wants a core and never gets one
        (process("S", wait_share=0.5), None),  # looked at between two turns
    ],
)
def test_what_a_silent_process_does_decides(samples: Iterator[Threads], seconds: float | None) -> None:
    found = seconds_until_out(samples)
    assert found == (None if seconds is None else pytest.approx(seconds, abs=2 * INTERVAL))


def test_a_heartbeat_forgives_everything() -> None:
    watch = ProgressWatch(STALL_SECONDS)
    samples = process("T")
    for _ in range(20):
        reason = watch.observe(next(samples), INTERVAL)
    assert reason == "the engine process is stopped"
    assert watch.has_beaten(2)
    assert watch.observe(next(samples), INTERVAL) is None


def test_a_vanished_process_is_no_starved_one() -> None:
    watch = ProgressWatch(STALL_SECONDS)
    reasons = [watch.observe({}, INTERVAL) for _ in range(20)]
    assert reasons[-1] is not None


@contextmanager
def running(program: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            yield child.pid
        finally:
            child.kill()


def seconds_of(pid: int) -> float:
    """Return the seconds that it ran or, on a busy machine, waited for a core."""
    thread = sample_process(pid)[str(pid)]
    return thread.run_seconds + thread.wait_seconds


def test_real_processes_look_as_expected() -> None:
    with running("import time; print(flush=True); time.sleep(600)") as pid:
        wait_until(lambda: {thread.state for thread in sample_process(pid).values()} == {"S"})
        first = sample_process(pid)
        time.sleep(0.4)
        assert sample_process(pid) == first
    with running("print(flush=True)\nwhile True: pass") as pid:
        began = seconds_of(pid)
        wait_until(lambda: seconds_of(pid) > began + 0.05)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: sample_process(pid)[str(pid)].state == "T")
    assert sample_process(pid) == {}


@pytest.mark.parametrize(
    ("work", "idle"),
    [
        (lambda second: Work(), 10.0),
        (lambda second: Work(num_bytes=100 * second), 10.0),  # a thread that wakes up to look at a queue
        (lambda second: Work(run_seconds=0.5 * second), 0.0),
        (lambda second: Work(num_bytes=1_000_000 * second), 0.0),  # a download
        (lambda second: Work(is_runnable=True), 0.0),  # a machine that is busy with other things
        (lambda second: Work(run_seconds=min(second, 6.0)), 4.0),
    ],
)
def test_a_start_is_idle_when_nothing_is_done(work: Callable[[float], Work], idle: float) -> None:
    watch = StartWatch()
    assert [watch.idle_seconds(work(second), 1.0) for second in range(11)][-1] == idle


def test_work_of_children_counts() -> None:
    """A parent waits for a child that downloads."""
    child = "print(flush=True)\nwith open('/dev/zero', 'rb') as f:\n  while True: f.read(1 << 20)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with running(parent) as pid:
        first = sample_work(pid)
        wait_until(lambda: sample_work(pid).num_bytes - first.num_bytes > 1 << 20)
        wait_until(lambda: sample_work(pid).run_seconds > first.run_seconds)
        [child_pid] = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        os.kill(child_pid, signal.SIGKILL)


# -- in a worker -----------------------------------------------------------------------------------------------------


async def test_an_engine_that_does_nothing_while_it_loads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    start_instead("import time; time.sleep(600)", monkeypatch)  # a network file system hangs
    monkeypatch.setattr(engine_watch, "START_WATCH_SECONDS", 0.1)
    config = from_args(WorkerConfig, ["--start-stall-seconds=1"])
    with pytest.raises(ConfigError, match="done nothing for 1 s while loading"):
        await EngineClient.start(Start(config, EngineConfig("dry-run"), GpuConfig(), ""))


def test_a_worker_ends_when_its_engine_hangs_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "sample_process", lambda pid: {"1": ThreadSample("T", 0.0, 0.0)})
    watch = engine_watch.EngineWatch(WorkerConfig())
    watch.memory.close()
    began = time.monotonic()
    found = [watch.trouble(began + 0.25 * look) for look in range(1, 200)]
    assert found[0] is None
    assert found[-1] == "the engine process is stopped"
    for look in range(200, 247):
        watch.trouble(began + 0.25 * look)
    with pytest.raises(UnavailableError, match="the engine process is stopped for 60 s"):
        watch.trouble(began + 70.0)


class Front:
    out_of_service = ""
    num_departures = 0

    def leave_service(self, reason: str) -> None:
        self.out_of_service = reason
        self.num_departures += 1


def test_a_worker_is_out_of_service_while_its_engine_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    front, watch = Front(), engine_watch.EngineWatch(WorkerConfig())
    watch.memory.close()
    for trouble, expected, num_departures in ((None, "", 0), ("blocked", "blocked", 1), ("blocked", "blocked", 1),
                                              ("stopped", "stopped", 2), (None, "", 2)):  # fmt: skip
        monkeypatch.setattr(watch, "trouble", lambda now, trouble=trouble: trouble)
        watch.judge(front, 0.0)
        assert (front.out_of_service, front.num_departures) == (expected, num_departures)
