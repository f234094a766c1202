"""The supervisor against small stand-in services: real processes, no models."""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from cli.cluster.child import child_command
from cli.cluster.ports import free_ports
from cli.cluster.service import ServiceSpec
from cli.cluster.supervisor import RestartPolicy, ServiceDiedError, StartError, Supervisor
from tests.harness.processes import is_alive
from tests.harness.waiting import until, wait_until


class Cluster:
    """Specs of stand-ins and what became of them, as a display is told."""

    def __init__(self, events: Path) -> None:
        self.events_path = events
        self.lines: list[tuple[str, str]] = []
        self.states: list[tuple[str, str]] = []
        self.statuses: list[tuple[str, str]] = []

    def line(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def state(self, name: str, state: str) -> None:
        self.states.append((name, state))

    def status(self, name: str, text: str) -> None:
        self.statuses.append((name, text))

    def spec(self, name: str, mode: str = "well", **fields) -> ServiceSpec:
        (port,) = free_ports(1)
        argv = (mode, str(port), str(self.events_path), name)
        return ServiceSpec(
            name, child_command("tests.harness.stand_in", argv), f"http://127.0.0.1:{port}/", env=os.environ, **fields
        )

    def supervisor(self, *specs: ServiceSpec, **kwargs) -> Supervisor:
        return Supervisor(specs, self, **kwargs)  # type: ignore[arg-type]  # it calls the two methods above

    def events(self, kind: str) -> list[tuple[str, int]]:
        """(name, pid) in the order in which they happened."""
        text = self.events_path.read_text() if self.events_path.exists() else ""
        rows = [line.split() for line in text.splitlines()]
        return [(name, int(pid)) for name, event, pid in rows if event == kind]

    def num_ready(self) -> int:
        """How often a service became ready."""
        return sum(state == "ready" for _, state in self.states)


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path / "events")
    yield made
    pids = [pid for _, pid in [*made.events("start"), *made.events("child")]]
    wait_until(lambda: not any(map(is_alive, pids)))  # the kernel ends a dead parent's child, a moment later


@pytest.fixture
def quick_restarts(monkeypatch):
    set_delays(monkeypatch, first=0.01, longest=0.05)


@pytest.fixture
def slow_restarts(monkeypatch):
    set_delays(monkeypatch, first=600.0, longest=600.0)
    monkeypatch.setattr(RestartPolicy, "_delay", 600.0)  # the first one would be immediate


def set_delays(monkeypatch, first, longest):
    monkeypatch.setattr("cli.cluster.supervisor.FIRST_DELAY_SECONDS", first)
    monkeypatch.setattr("cli.cluster.supervisor.MAX_DELAY_SECONDS", longest)


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor):
    stopping = asyncio.Event()
    await supervisor.start()
    task = asyncio.create_task(supervisor.run(stopping))
    try:
        yield supervisor
    finally:
        stopping.set()
        await task
        await supervisor.stop()


async def test_services_start_at_once_and_stop_in_their_order(cluster):
    supervisor = cluster.supervisor(
        cluster.spec("agent", stop_stage=2),
        cluster.spec("worker", stop_stage=1),
        cluster.spec("router", stop_stage=0),
    )
    async with running(supervisor):
        assert {state for _, state in cluster.states[:3]} == {"starting"}
        assert {state for _, state in cluster.states[-2:]} == {"ready"}
    assert [name for name, _ in cluster.events("term")] == ["router", "worker", "agent"]
    assert ("worker", "hello from worker") in cluster.lines


async def test_an_early_death_names_the_reason_and_ends_the_rest(cluster):
    supervisor = cluster.supervisor(cluster.spec("good"), cluster.spec("bad", "dies"))
    try:
        with pytest.raises(StartError, match=r"bad ended .*exit code 3.*: error: the disk is on fire"):
            await supervisor.start()
    finally:
        await supervisor.stop(1.0)
    assert not any(is_alive(pid) for _, pid in cluster.events("start"))


@pytest.mark.wing("cli.start_progress")
async def test_what_a_service_says_of_itself_is_passed_on_after_a_restart_too(cluster, tmp_path, quick_restarts):
    spec = cluster.spec("a", status_socket=str(tmp_path / "a.status"))
    async with running(cluster.supervisor(spec)):
        assert cluster.statuses == [("a", "loading weights: 41%")]
        os.kill(dict(cluster.events("start"))["a"], signal.SIGKILL)
        await until(lambda: len(cluster.statuses) == 2)


async def test_restarts_never_end(cluster, quick_restarts):
    names, num_kills = ("router", "worker"), 8
    async with running(cluster.supervisor(*map(cluster.spec, names))):
        for count in range(1, num_kills + 1):
            for name, pid in cluster.events("start")[-len(names) :]:
                assert name in names
                os.kill(pid, signal.SIGKILL)
            await until(lambda count=count: cluster.num_ready() == len(names) * (count + 1))
        assert all(is_alive(pid) for _, pid in cluster.events("start")[-len(names) :])
    deaths = [text for _, text in cluster.lines if "ended (SIGKILL)" in text]
    assert len(deaths) == num_kills * len(names)
    assert all(re.fullmatch(r"\w+ ended \(SIGKILL\); restarting it (now|in 0.0\d s)", text) for text in deaths)


async def test_a_service_that_dies_before_it_is_ready_is_tried_again_and_says_why(cluster, quick_restarts):
    async with running(cluster.supervisor(cluster.spec("a", "dies-later"))):
        os.kill(cluster.events("start")[0][1], signal.SIGKILL)
        await until(lambda: len(cluster.events("start")) == 9)
    told = [text for source, text in cluster.lines if source == "serve"]
    assert told[0] == "a ended (SIGKILL); restarting it now"
    assert told[1] == (
        "a ended before it was ready (exit code 3): error: the disk is on fire; restarting it in 0.01 s"
    )
    assert told[-1].endswith("restarting it in 0.05 s")
    assert cluster.num_ready() == 1


async def test_a_drained_service_is_replaced_and_that_is_no_death(cluster, slow_restarts):
    supervisor = cluster.supervisor(cluster.spec("a"), exit_on_failure=True)
    async with running(supervisor):
        for count in range(1, 4):
            os.kill(cluster.events("start")[-1][1], signal.SIGTERM)  # not from the supervisor: exit code 0
            await until(lambda count=count: cluster.num_ready() == count + 1)
    told = [text for source, text in cluster.lines if source == "serve"]
    assert told == ["a ended normally: replacing it now"] * 3


async def test_exit_on_failure_stops_the_others_in_order(cluster):
    supervisor = cluster.supervisor(
        cluster.spec("agent", stop_stage=2), cluster.spec("worker", stop_stage=1), cluster.spec("router"),
        exit_on_failure=True,
    )  # fmt: skip
    await supervisor.start()
    os.kill(dict(cluster.events("start"))["worker"], signal.SIGKILL)
    with pytest.raises(ServiceDiedError, match=r"worker ended \(SIGKILL\)"):
        await supervisor.run(asyncio.Event())
    await supervisor.stop()
    assert [name for name, _ in cluster.events("term")] == ["router", "agent"]
    assert len(cluster.events("start")) == 3


async def test_what_waits_for_its_restart_is_not_killed_twice(cluster, monkeypatch, slow_restarts):
    async with running(cluster.supervisor(cluster.spec("a"), cluster.spec("b"))) as own:
        pids = dict(cluster.events("start"))
        os.kill(pids["b"], signal.SIGKILL)
        await until(lambda: any(text.endswith("restarting it in 600 s") for _, text in cluster.lines))
        assert is_alive(pids["a"])
        killed = []
        with monkeypatch.context() as patched:
            patched.setattr("os.killpg", lambda *call: killed.append(call))
            own.kill()  # nothing for b: its process id may belong to somebody else by now
        assert [pid for pid, _ in killed] == [pids["a"]]


async def test_a_program_that_cannot_be_started_is_an_early_death(cluster):
    spec = dataclasses.replace(cluster.spec("a"), command=("/nowhere/program",))
    with pytest.raises(StartError, match=r"a ended before it was ready .*cannot be started: No such file"):
        await cluster.supervisor(spec).start()


async def test_what_a_dead_service_had_started_goes_with_it(cluster, quick_restarts):
    async with running(cluster.supervisor(cluster.spec("front", "parent"))):
        rank = cluster.events("child")[0][1]
        assert is_alive(rank)
        os.kill(cluster.events("start")[0][1], signal.SIGKILL)
        await until(lambda: not is_alive(rank))
        await until(lambda: len(cluster.events("child")) == 2)


async def test_a_service_that_ignores_sigterm_is_killed_after_its_grace(cluster):
    begin = time.monotonic()
    async with running(cluster.supervisor(cluster.spec("deaf", "deaf", grace_seconds=1.5))):
        begin = time.monotonic()
    assert 1.5 <= time.monotonic() - begin < 60.0
    assert [name for name, _ in cluster.events("term")] == ["deaf"]


async def test_sigkill_of_the_parent_leaves_no_process_and_no_directory(cluster):
    ports = [str(port) for port in free_ports(2)]
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.cli.cluster.small_cluster",
        *ports,
        str(cluster.events_path),
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    word, _, path = (await parent.stdout.readline()).decode().strip().partition(" ")
    assert word == "ready"
    assert (Path(path) / "a.sock").exists()
    assert Path(path).stat().st_mode & 0o777 == 0o700
    pids = [pid for _, pid in cluster.events("start")]
    assert all(is_alive(pid) for pid in pids)
    parent.kill()
    await parent.wait()
    await until(lambda: not any(is_alive(pid) for pid in pids))
    await until(lambda: not Path(path).exists())


def test_the_first_restart_is_immediate_and_later_ones_wait_longer_up_to_a_limit():
    policy = RestartPolicy()
    assert [policy.next_delay(3.0) for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 10, 10]


def test_a_service_that_was_ready_for_longer_than_the_longest_delay_starts_afresh(monkeypatch):
    set_delays(monkeypatch, first=1, longest=4)
    policy = RestartPolicy()
    ready = (0, 0, 0, 0, 4, 4.1, 0)
    assert [policy.next_delay(seconds) for seconds in ready] == [0, 1, 2, 4, 4, 0, 1]
