"""Restarts of small stand-in services: real processes, no models."""

import asyncio
import os
import re
import signal
from functools import partial

import pytest

from cli.cluster.supervisor import ServiceDiedError
from cli.restarts.restarts import RestartPolicy, restart
from tests.cli.cluster.stand_ins import running
from tests.harness.processes import is_alive
from tests.harness.waiting import until


@pytest.fixture
def quick_restarts(monkeypatch):
    set_delays(monkeypatch, first=0.01, longest=0.05)


@pytest.fixture
def slow_restarts(monkeypatch):
    set_delays(monkeypatch, first=600.0, longest=600.0)
    monkeypatch.setattr(RestartPolicy, "_delay", 600.0)  # the first one would be immediate


def set_delays(monkeypatch, first, longest):
    monkeypatch.setattr("cli.restarts.restarts.FIRST_DELAY_SECONDS", first)
    monkeypatch.setattr("cli.restarts.restarts.MAX_DELAY_SECONDS", longest)


@pytest.mark.wing("cli.start_progress")
async def test_what_a_service_says_of_itself_is_passed_on_after_a_restart_too(cluster, tmp_path, quick_restarts):
    spec = cluster.spec("a", status_socket=str(tmp_path / "a.status"))
    async with running(cluster.supervisor(spec, keep=restart)):
        assert cluster.statuses == [("a", "loading weights: 41%")]
        os.kill(dict(cluster.events("start"))["a"], signal.SIGKILL)
        await until(lambda: len(cluster.statuses) == 2)


async def test_restarts_never_end(cluster, quick_restarts):
    names, num_kills = ("router", "worker"), 8
    async with running(cluster.supervisor(*map(cluster.spec, names), keep=restart)):
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
    async with running(cluster.supervisor(cluster.spec("a", "dies-later"), keep=restart)):
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
    supervisor = cluster.supervisor(cluster.spec("a"), keep=partial(restart, exit_on_failure=True))
    async with running(supervisor):
        for count in range(1, 4):
            os.kill(cluster.events("start")[-1][1], signal.SIGTERM)  # not from the supervisor: exit code 0
            await until(lambda count=count: cluster.num_ready() == count + 1)
    told = [text for source, text in cluster.lines if source == "serve"]
    assert told == ["a ended normally: replacing it now"] * 3


async def test_exit_on_failure_stops_the_others_in_order(cluster):
    supervisor = cluster.supervisor(
        cluster.spec("agent", stop_stage=2), cluster.spec("worker", stop_stage=1), cluster.spec("router"),
        keep=partial(restart, exit_on_failure=True),
    )  # fmt: skip
    await supervisor.start()
    os.kill(dict(cluster.events("start"))["worker"], signal.SIGKILL)
    with pytest.raises(ServiceDiedError, match=r"worker ended \(SIGKILL\)"):
        await supervisor.run(asyncio.Event())
    await supervisor.stop()
    assert [name for name, _ in cluster.events("term")] == ["router", "agent"]
    assert len(cluster.events("start")) == 3


async def test_what_waits_for_its_restart_is_not_killed_twice(cluster, monkeypatch, slow_restarts):
    async with running(cluster.supervisor(cluster.spec("a"), cluster.spec("b"), keep=restart)) as own:
        pids = dict(cluster.events("start"))
        os.kill(pids["b"], signal.SIGKILL)
        await until(lambda: any(text.endswith("restarting it in 600 s") for _, text in cluster.lines))
        assert is_alive(pids["a"])
        killed = []
        with monkeypatch.context() as patched:
            patched.setattr("os.killpg", lambda *call: killed.append(call))
            own.kill()  # nothing for b: its process id may belong to somebody else by now
        assert [pid for pid, _ in killed] == [pids["a"]]


async def test_what_a_dead_service_had_started_goes_with_it(cluster, quick_restarts):
    async with running(cluster.supervisor(cluster.spec("front", "parent"), keep=restart)):
        rank = cluster.events("child")[0][1]
        assert is_alive(rank)
        os.kill(cluster.events("start")[0][1], signal.SIGKILL)
        await until(lambda: not is_alive(rank))
        await until(lambda: len(cluster.events("child")) == 2)


def test_the_first_restart_is_immediate_and_later_ones_wait_longer_up_to_a_limit():
    policy = RestartPolicy()
    assert [policy.next_delay(3.0) for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 10, 10]


def test_a_service_that_was_ready_for_longer_than_the_longest_delay_starts_afresh(monkeypatch):
    set_delays(monkeypatch, first=1, longest=4)
    policy = RestartPolicy()
    ready = (0, 0, 0, 0, 4, 4.1, 0)
    assert [policy.next_delay(seconds) for seconds in ready] == [0, 1, 2, 4, 4, 0, 1]
