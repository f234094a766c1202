"""Supervisor of a set of services: starts them, waits until one ends, stops them in order.

Knows processes, health targets and exit codes, but not what the services do or what their flags mean. Calls
`common.net.healthcheck` for readiness.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cli.cluster.progress import StartDisplay
from cli.cluster.service import Service, ServiceSpec
from common.errors import MiniInferError
from common.net.healthcheck import is_ready
from common.wings import from_wing

POLL_SECONDS = 0.1
CHECK_SECONDS = 1.0


class StartError(MiniInferError):
    """A service ended before it was ready. tail: the last lines that it wrote."""

    def __init__(self, message: str, name: str, tail: Sequence[str]) -> None:
        super().__init__(message)
        self.name = name
        self.tail = tuple(tail)


class ServiceDiedError(MiniInferError):
    """A service died, and the cluster shall end with it."""


class Supervisor:
    """Call `start`, then `run`, and `stop` in any case.

    keep: called for each service once it is ready; watches it and perhaps restarts it.
    """

    def __init__(self, specs: Sequence[ServiceSpec], display: StartDisplay, keep: Keep) -> None:
        self.display = display
        self._services = [Service(spec, display) for spec in specs]
        self._keep = keep

    async def start(self) -> None:
        """Start all services and return when all are ready. Raises StartError if one ends."""
        try:
            async with asyncio.TaskGroup() as group:
                for service in self._services:
                    group.create_task(self._start_one(service))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first death is the cause: it cancelled the others

    async def run(self, stopping: asyncio.Event) -> None:
        """Keep all services until `stopping` is set. Raises ServiceDiedError if one ends for good."""
        waits: list[Coroutine[Any, Any, object]] = [self._keep(self, service) for service in self._services]
        tasks = [asyncio.create_task(wait) for wait in (*waits, stopping.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in done:
            task.result()

    async def stop(self, max_grace_seconds: float = float("inf")) -> None:
        """Stop all services in the order of their stages: SIGTERM, the grace period, SIGKILL."""
        for stage in sorted({service.spec.stop_stage for service in self._services}):
            members = [service for service in self._services if service.spec.stop_stage == stage]
            await asyncio.gather(*(self._stop_one(service, max_grace_seconds) for service in members))

    def kill(self) -> None:
        """Kill all services at once; `stop` then returns soon."""
        for service in self._services:
            service.kill()

    async def _start_one(self, service: Service) -> None:
        name = service.spec.name
        self.display.state(name, "starting")
        if not await self.spawn(service):
            self.display.state(name, "failed")
            raise StartError(death(service, await service.wait(), was_ready=False), name, service.tail)

    async def spawn(self, service: Service) -> bool:
        """Start a service and return whether it became ready; if not, it has ended."""
        await service.spawn()
        ready = asyncio.create_task(_until_ready(service.spec.health_target))
        ended = asyncio.create_task(service.wait())
        try:
            await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return False
            self.display.state(service.spec.name, "ready")
            return True
        finally:
            ready.cancel()
            ended.cancel()

    async def _stop_one(self, service: Service, max_grace_seconds: float) -> None:
        await service.stop(min(service.spec.grace_seconds, max_grace_seconds))
        self.display.state(service.spec.name, "stopped")


Keep = Callable[[Supervisor, Service], Coroutine[Any, Any, None]]


async def until_death(_: Supervisor, service: Service) -> None:
    """Raise ServiceDiedError when the service ends. `cli/restarts` has another that restarts it."""
    raise ServiceDiedError(death(service, await service.wait(), was_ready=True))


async def _until_ready(target: str) -> None:
    while not await is_ready(target, CHECK_SECONDS):
        await asyncio.sleep(POLL_SECONDS)


def death(service: Service, code: int, was_ready: bool) -> str:
    """Describe a death. Before the service was ready, its last line is the reason; later it may say anything."""
    name = service.spec.name
    if was_ready:
        return f"{name} ended ({_exit_text(code)})"
    reason = next((line for line in reversed(service.tail) if line.strip()), "it wrote nothing")
    message_of = from_wing("common.json_logs.formatter:message_of") or str
    return f"{name} ended before it was ready ({_exit_text(code)}): {message_of(reason)}"


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
