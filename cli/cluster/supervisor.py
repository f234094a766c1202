"""Supervisor of a set of services: start, restart what ends, stop in order.

Knows processes, health targets and exit codes; not what the services do, nor what their flags mean. Calls
`common.net.healthcheck` for readiness and `RestartPolicy` for every decision about a death.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from cli.cluster.progress import StartDisplay
from cli.cluster.service import Service, ServiceSpec
from common.errors import MiniInferError
from common.net.healthcheck import is_ready
from common.wings import from_wing

POLL_SECONDS = 0.1
CHECK_SECONDS = 1.0
FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 10.0


class StartError(MiniInferError):
    """A service ended before it was ready. `tail`: what it wrote last."""

    def __init__(self, message: str, name: str, tail: Sequence[str]) -> None:
        super().__init__(message)
        self.name = name
        self.tail = tuple(tail)


class ServiceDiedError(MiniInferError):
    """A service died, and the cluster is to end with it."""


class RestartPolicy:
    """Decides after each death of one service how long to wait before its restart. Pure; it never gives up.

    The first restart is immediate, because open streams wait for it. Every further death doubles the delay, from
    FIRST_DELAY_SECONDS to MAX_DELAY_SECONDS. A service that was ready for longer than that starts afresh.
    """

    _delay = 0.0

    def next_delay(self, ready_seconds: float) -> float:
        """Seconds to wait after a death. `ready_seconds`: how long the service had been ready; 0: it never was."""
        delay = 0.0 if ready_seconds > MAX_DELAY_SECONDS else self._delay
        self._delay = min(max(FIRST_DELAY_SECONDS, 2 * delay), MAX_DELAY_SECONDS)
        return delay


class Supervisor:
    """`start`, then `run` until the event is set, then `stop`. `stop` is due whatever happened before.

    exit_on_failure: the first death ends `run`; else a service that dies is restarted, without limit.
    """

    def __init__(self, specs: Sequence[ServiceSpec], display: StartDisplay, exit_on_failure: bool = False) -> None:
        self._services = [Service(spec, display) for spec in specs]
        self._display = display
        self._exit_on_failure = exit_on_failure

    async def start(self) -> None:
        """Start all services; returns when all are ready. Raises StartError for one that ends."""
        try:
            async with asyncio.TaskGroup() as group:
                for service in self._services:
                    group.create_task(self._start_one(service))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first death explains; the others were cancelled by it

    async def run(self, stopping: asyncio.Event) -> None:
        """Start again what ends until `stopping` is set. Raises ServiceDiedError with `exit_on_failure`."""
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(self._keep(service)) for service in self._services]
        tasks.append(asyncio.create_task(stopping.wait()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in done:
            task.result()

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
        self._display.state(name, "starting")
        if not await self._spawn(service):
            self._display.state(name, "failed")
            raise StartError(_death(service, await service.wait(), was_ready=False), name, service.tail)

    async def _spawn(self, service: Service) -> bool:
        """Start a service; whether it became ready. If not, it has ended."""
        await service.spawn()
        ready = asyncio.create_task(_until_ready(service.spec.health_target))
        ended = asyncio.create_task(service.wait())
        try:
            await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return False
            self._display.state(service.spec.name, "ready")
            return True
        finally:
            ready.cancel()
            ended.cancel()

    async def _stop_one(self, service: Service, max_grace_seconds: float) -> None:
        await service.stop(min(service.spec.grace_seconds, max_grace_seconds))
        self._display.state(service.spec.name, "stopped")

    async def _keep(self, service: Service) -> None:
        policy = RestartPolicy()
        loop = asyncio.get_running_loop()
        is_ready, since = True, loop.time()  # `start` has seen it
        while True:
            code = await service.wait()
            if is_ready and code == 0:  # it was asked to end: a drained worker has finished its requests
                self._display.line("serve", f"{service.spec.name} ended normally: replacing it now")
            else:
                death = _death(service, code, is_ready)
                if self._exit_on_failure:
                    raise ServiceDiedError(death)
                delay = policy.next_delay(loop.time() - since if is_ready else 0.0)
                self._display.line("serve", f"{death}; restarting it {f'in {delay:g} s' if delay else 'now'}")
                await asyncio.sleep(delay)
            is_ready, since = await self._spawn(service), loop.time()


async def _until_ready(target: str) -> None:
    while not await is_ready(target, CHECK_SECONDS):
        await asyncio.sleep(POLL_SECONDS)


def _death(service: Service, code: int, was_ready: bool) -> str:
    """Describe a death. The last line written before the service was ready is its reason; later ones may be any."""
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
