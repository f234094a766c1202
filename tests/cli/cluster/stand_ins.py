"""Clusters of small stand-in services: real processes, no models."""

import asyncio
import contextlib
import os
from pathlib import Path

from cli.cluster.child import child_command
from cli.cluster.ports import free_ports
from cli.cluster.service import ServiceSpec
from cli.cluster.supervisor import Supervisor, until_death


class Cluster:
    """Specs of stand-ins, and their events as reported to a display."""

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

    def supervisor(self, *specs: ServiceSpec, keep=until_death) -> Supervisor:
        return Supervisor(specs, self, keep)  # type: ignore[arg-type]  # it calls the two methods above

    def events(self, kind: str) -> list[tuple[str, int]]:
        """(name, pid) in the order in which they happened."""
        text = self.events_path.read_text() if self.events_path.exists() else ""
        rows = [line.split() for line in text.splitlines()]
        return [(name, int(pid)) for name, event, pid in rows if event == kind]

    def num_ready(self) -> int:
        """Return how often a service became ready."""
        return sum(state == "ready" for _, state in self.states)


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
