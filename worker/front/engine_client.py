"""Starts the engine process and exchanges messages with it. Knows neither requests nor routers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import ConfigError, TransferError, UnavailableError
from common.wings import call_wing
from kvstore.transports.sockets import pack
from worker.frames import SOCKET_BUFFER_BYTES, read_message
from worker.messages import Failed, Ready, Start, StepReport, Stop, ToEngine

if TYPE_CHECKING:
    from worker.hangs.engine_watch import EngineWatch

logger = logging.getLogger(__name__)
STOP_SECONDS = 5.0
# How long threads of a GEMM spin before they sleep: about 50 us, more than the time between two GEMMs of a step.
# libgomp's default, 300,000, is longer than a time slice, see docs/decisions/cpu-execution.md.
SPIN_COUNT = {"GOMP_SPINCOUNT": "2000"}


@dataclass(eq=False)
class EngineClient:
    """A child process with an engine. Call `start`, then read `reports` until it ends."""

    ready: Ready
    watch: EngineWatch | None  # detects hangs, if that wing is installed
    _process: asyncio.subprocess.Process
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, start: Start) -> EngineClient:
        """Start the child and wait until its model is loaded. Raises ConfigError with the reason if that fails."""
        watch: EngineWatch | None = call_wing("worker.hangs.engine_watch:EngineWatch", start.worker)
        ours, theirs = socket.socketpair()
        with theirs, nullcontext() if watch is None else watch.memory:
            descriptors = {"fd": theirs.fileno()}
            if watch is not None:
                descriptors["heartbeat-fd"] = watch.memory.fileno()
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "worker.engine_process.main",
                *(f"--{name}={number}" for name, number in descriptors.items()),
                pass_fds=[*descriptors.values()],
                stdin=asyncio.subprocess.DEVNULL,
                env=SPIN_COUNT | os.environ,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=SOCKET_BUFFER_BYTES)
        writer.write(pack(start))
        try:
            first = await _first_message(reader, process, watch)
        except BaseException:  # Ctrl-C and cancelled tasks, too: do not leak the socket
            writer.close()
            raise
        return cls(first, watch, process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def reports(self) -> AsyncIterator[StepReport]:
        """Yield the engine process's reports. Raises UnavailableError when it is gone."""
        while True:
            try:
                message = await read_message(self._reader)
            except (EOFError, TransferError) as error:
                raise UnavailableError("the engine process is gone") from error
            if isinstance(message, Failed):
                raise UnavailableError(f"the engine process ends: {message.reason}")
            assert isinstance(message, StepReport)
            yield message

    def send(self, message: ToEngine) -> None:
        if not self._writer.is_closing():
            self._writer.write(pack(message))

    async def stop(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        if self._process.returncode is None:
            self.send(Stop())
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            logger.warning("the engine process does not stop: killing it")
            self._process.kill()
            await self._process.wait()
        self._writer.close()


async def _first_message(
    reader: asyncio.StreamReader, process: asyncio.subprocess.Process, watch: EngineWatch | None
) -> Ready:
    """Wait until the engine is loaded, and end its process if that fails. Raises ConfigError with the reason."""
    reading = read_message(reader)
    try:
        first = await (reading if watch is None else watch.unless_idle(reading, process.pid))
    except (asyncio.CancelledError, ConfigError):
        process.kill()
        await process.wait()
        raise
    except (EOFError, TransferError):
        status = await process.wait()
        if status == -signal.SIGKILL:
            raise ConfigError(
                "the engine process was killed while loading, most likely because host memory ended: give it "
                "more, choose a smaller model, or lower --kv-staging-gb (on a CPU --kv-cache-gb)"
            ) from None
        raise ConfigError(f"the engine process ended with status {status} while loading") from None
    if isinstance(first, Failed):
        await process.wait()
        raise ConfigError(first.reason)
    assert isinstance(first, Ready)
    return first
