"""The supervisor against small stand-in services: real processes, no models."""

import asyncio
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from cli.cluster.ports import free_ports
from cli.cluster.supervisor import ServiceDiedError, StartError
from tests.cli.cluster.stand_ins import running
from tests.harness.processes import is_alive
from tests.harness.waiting import until


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


async def test_the_first_death_ends_the_others_in_order(cluster):
    supervisor = cluster.supervisor(
        cluster.spec("agent", stop_stage=2), cluster.spec("worker", stop_stage=1), cluster.spec("router")
    )
    await supervisor.start()
    os.kill(dict(cluster.events("start"))["worker"], signal.SIGKILL)
    with pytest.raises(ServiceDiedError, match=r"worker ended \(SIGKILL\)"):
        await supervisor.run(asyncio.Event())
    await supervisor.stop()
    assert [name for name, _ in cluster.events("term")] == ["router", "agent"]
    assert len(cluster.events("start")) == 3


async def test_a_program_that_cannot_be_started_is_an_early_death(cluster):
    spec = dataclasses.replace(cluster.spec("a"), command=("/nowhere/program",))
    with pytest.raises(StartError, match=r"a ended before it was ready .*cannot be started: No such file"):
        await cluster.supervisor(spec).start()


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
