"""Keeps a set of services running: start in stages, restart what dies, stop in order.

Knows processes, health targets and exit codes; not what the services do, nor what their flags mean. Calls
`common.healthcheck` for readiness and `RestartPolicy` for every decision about a death.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from typing import Any

from cli.restart import RestartPolicy
from cli.service import LineSink, Service, ServiceSpec
from common.errors import MiniInferError
from common.healthcheck import is_ready

POLL_SECONDS = 0.1
CHECK_SECONDS = 1.0

# (service, state): starting, ready, failed, restarting, gave up or stopped
StateSink = Callable[[str, str], None]


class StartError(MiniInferError):
    """A service ended before it was ready. `tail`: what it wrote last."""

    def __init__(self, message: str, name: str, tail: Sequence[str]) -> None:
        super().__init__(message)
        self.name = name
        self.tail = tuple(tail)


class Supervisor:
    """`start`, then `run` until the event is set, then `stop`. `stop` is due whatever happened before."""

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        on_line: LineSink,
        on_state: StateSink,
        new_policy: Callable[[], RestartPolicy] = RestartPolicy,
    ) -> None:
        self._services = [Service(spec, on_line) for spec in specs]
        self._on_line = on_line
        self._on_state = on_state
        self._new_policy = new_policy

    async def start(self) -> None:
        """Start all services, stage by stage; returns when all are ready. Raises StartError for one that ends."""
        for stage in sorted({service.spec.stage for service in self._services}):
            members = [service for service in self._services if service.spec.stage == stage]
            try:
                async with asyncio.TaskGroup() as group:
                    for service in members:
                        group.create_task(self._start_one(service))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None  # the first death explains; the others were cancelled by it

    async def run(self, stopping: asyncio.Event) -> None:
        """Restart what dies until `stopping` is set."""
        keeping = asyncio.gather(*(self._keep(service) for service in self._services))
        stopped = asyncio.create_task(stopping.wait())
        either: list[asyncio.Future[Any]] = [stopped, keeping]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()  # a bug's exception, or: all were given up, and the user may read why
                await stopped
        finally:
            stopped.cancel()
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping

    async def stop(self, max_grace_seconds: float = float("inf")) -> None:
        """Stop all, in stages: SIGTERM, the grace period, SIGKILL."""
        for stage in sorted({service.spec.stop_stage for service in self._services}):
            members = [service for service in self._services if service.spec.stop_stage == stage]
            await asyncio.gather(*(self._stop_one(service, max_grace_seconds) for service in members))

    def kill(self) -> None:
        """End all at once; `stop` then returns soon."""
        for service in self._services:
            service.kill()

    async def _start_one(self, service: Service) -> None:
        name = service.spec.name
        self._on_state(name, "starting")
        await service.spawn()
        ready = asyncio.create_task(_until_ready(service.spec.health_target))
        ended = asyncio.create_task(service.wait())
        try:
            await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                self._on_state(name, "ready")
                return
            self._on_state(name, "failed")
            raise StartError(_start_error(name, ended.result(), service.tail), name, service.tail)
        finally:
            ready.cancel()
            ended.cancel()

    async def _stop_one(self, service: Service, max_grace_seconds: float) -> None:
        await service.stop(min(service.spec.grace_seconds, max_grace_seconds))
        self._on_state(service.spec.name, "stopped")

    async def _keep(self, service: Service) -> None:
        name = service.spec.name
        policy = self._new_policy()
        loop = asyncio.get_running_loop()
        while True:
            code = await service.wait()
            delay = policy.next_delay(loop.time())
            if delay is None:
                self._on_line("serve", f"{name} ended ({_exit_text(code)}) too often: not started again")
                self._on_state(name, "gave up")
                return
            self._on_line("serve", f"{name} ended ({_exit_text(code)}): starting it again in {delay:.0f} s")
            self._on_state(name, "restarting")
            await asyncio.sleep(delay)
            await service.spawn()


async def _until_ready(target: str) -> None:
    while not await is_ready(target, CHECK_SECONDS):
        await asyncio.sleep(POLL_SECONDS)


def _start_error(name: str, code: int, tail: Sequence[str]) -> str:
    """The last line that a dying service wrote is its reason; the ones before it are for whoever looks closer."""
    reason = next((line for line in reversed(tail) if line.strip()), "it wrote nothing")
    return f"{name} ended before it was ready ({_exit_text(code)}): {reason}"


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
