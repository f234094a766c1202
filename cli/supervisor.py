"""Keeps a set of services running: start in stages, restart what dies, stop in order.

Knows processes, health targets and exit codes; not what the services do, nor what their flags mean. Calls
`common.healthcheck` for readiness and `RestartPolicy` for every decision about a death.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cli.restart import RestartPolicy
from common.errors import MiniInferError
from common.healthcheck import is_ready

TAIL_LINES = 12
POLL_SECONDS = 0.1
CHECK_SECONDS = 1.0
MAX_LINE_BYTES = 1 << 16

LineSink = Callable[[str, str], None]  # (service, line)
StateSink = Callable[
    [str, str], None
]  # (service, "starting" | "ready" | "failed" | "restarting" | "gave up" | "stopped")


class StartError(MiniInferError):
    """A service ended before it was ready. `tail`: what it wrote last."""

    def __init__(self, message: str, name: str, tail: Sequence[str]) -> None:
        super().__init__(message)
        self.name = name
        self.tail = tuple(tail)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One service. `stage`: all of a stage are ready before the next one starts; stopped in `stop_stage` order."""

    name: str
    command: tuple[str, ...]
    health_target: str  # host:port of a gRPC service, or an http:// address
    stage: int = 0
    stop_stage: int = 0
    grace_seconds: float = 5.0  # between SIGTERM and SIGKILL
    env: Mapping[str, str] = field(default_factory=dict)  # the whole environment


class Service:
    """One running service: its process, and its output line by line."""

    def __init__(self, spec: ServiceSpec, on_line: LineSink) -> None:
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._is_swept = False  # whether all of its session is gone

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def spawn(self) -> None:
        """Start the process in a session of its own, so that Ctrl-C reaches us alone and we stop it in order."""
        # A pipe of our own: asyncio's would make `wait` last until whoever else holds its other end is gone.
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(self.spec.env),
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._is_swept = False
        self._reader = asyncio.create_task(self._read(read_end))

    async def wait(self) -> int:
        """Its exit code, when it has ended, its output is read, and what it had started is gone."""
        assert self._process is not None
        assert self._reader is not None
        code = await self._process.wait()
        self.kill()  # what the service started has no parent now
        self._is_swept = True
        await asyncio.wait([self._reader], timeout=1.0)
        return code

    def kill(self) -> None:
        """SIGKILL for the service and everything in its session, while there is something: ids are used again."""
        if self._process is not None and not self._is_swept:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM, up to `grace_seconds`, then SIGKILL."""
        if self._process is None:
            return
        if self.is_running:
            self._process.terminate()
        try:
            await asyncio.wait_for(self.wait(), grace_seconds)
        except TimeoutError:
            self._on_line(self.spec.name, f"still running {grace_seconds:.0f} s after SIGTERM: killed")
            self.kill()
            await self.wait()

    async def _read(self, pipe: int) -> None:
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", buffering=0)
        )
        try:
            await self._read_lines(stream)
        finally:
            transport.close()

    async def _read_lines(self, stream: asyncio.StreamReader) -> None:
        pending = b""
        while chunk := await stream.read(MAX_LINE_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._emit(line)
            if len(pending) > MAX_LINE_BYTES:
                self._emit(pending)
                pending = b""
        if pending:
            self._emit(pending)

    def _emit(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self.tail.append(text)
        self._on_line(self.spec.name, text)


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
