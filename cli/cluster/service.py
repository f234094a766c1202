"""One service as a child process: start, output line by line, exit, SIGTERM, SIGKILL of its whole session.

Knows nothing of other services, of readiness, or of restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from cli.cluster.progress import StartDisplay
from common.process import NOTIFY_SOCKET
from common.wings import has_wing

TAIL_LINES = 12
NOT_STARTED = 126  # the exit code of shells for a command that they cannot start
MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One service. All start at once, and stop in the order of `stop_stage`."""

    name: str
    command: tuple[str, ...]
    health_target: str  # host:port of a gRPC service, or an http:// address
    stop_stage: int = 0
    grace_seconds: float = 5.0  # between SIGTERM and SIGKILL
    env: Mapping[str, str] = field(default_factory=dict)  # the whole environment
    status_socket: str = ""  # path where it reports what it does, see `cli/start_progress`; empty: it does not


class Service:
    """One running service: its process, its output line by line, and its reports of what it is doing."""

    def __init__(self, spec: ServiceSpec, display: StartDisplay) -> None:
        self.spec = spec
        self._display = display
        self._status: asyncio.DatagramTransport | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._is_swept = False  # its whole session is gone

    async def spawn(self) -> None:
        """Start the process in its own session, so that Ctrl-C reaches only us and we stop services in order.

        If the process cannot be started, for lack of memory, descriptors or the program, `wait` returns NOT_STARTED.
        """
        self.tail.clear()
        self._process = self._reader = None
        try:
            await self._spawn()
        except OSError as error:
            self._emit(f"it cannot be started: {error.strerror or error}".encode())

    async def _spawn(self) -> None:
        env = dict(self.spec.env)
        if self.spec.status_socket and self._status is None and has_wing("cli.start_progress"):
            from cli.start_progress.status_reader import read_statuses

            self._status = await read_statuses(self.spec.status_socket, partial(self._display.status, self.spec.name))
        if self._status is not None:
            env[NOTIFY_SOCKET] = self.spec.status_socket
        # Our own pipe: with asyncio's, `wait` would last until every other holder of its write end is gone.
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        except BaseException:  # Ctrl-C and cancelled tasks, too: the pipe must not stay open
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._is_swept = False
        self._reader = asyncio.create_task(self._read(read_end))

    async def wait(self) -> int:
        """Wait until the service has ended, its output is read and its children are gone; return the exit code."""
        if self._process is None or self._reader is None:
            return NOT_STARTED
        code = await self._process.wait()
        self.kill()  # the children of the service have no parent now
        self._is_swept = True
        if self._status is not None:
            self._status.close()
            self._status = None
        await asyncio.wait([self._reader], timeout=1.0)
        return code

    def kill(self) -> None:
        """Send SIGKILL to the service's whole session, unless it is gone: the kernel reuses ids."""
        if self._process is not None and not self._is_swept:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, wait up to `grace_seconds`, then send SIGKILL."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(self.wait(), grace_seconds)
        except TimeoutError:
            self._display.line(self.spec.name, f"still running {grace_seconds:.0f} s after SIGTERM: killed")
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
        self._display.line(self.spec.name, text)
