"""How a worker's front watches for hangs of its engine process, while it loads and while it serves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Protocol, TypeVar

from common.errors import ConfigError, UnavailableError
from worker.config import WorkerConfig
from worker.hangs.heartbeat import Heartbeat
from worker.hangs.liveness import ProgressWatch, StartWatch, sample_process, sample_work
from worker.hangs.settings import HangSettings

T = TypeVar("T")
logger = logging.getLogger(__name__)
START_WATCH_SECONDS = 1.0  # between two checks of an engine that loads
MAX_INTERVAL_SECONDS = 0.5  # between two checks of an engine that serves; if it was longer, this process slept
IDLE_BEAT_SECONDS = 0.6  # an idle engine beats twice a second, so no closer look is needed before
HUNG_EXIT_SECONDS = 60.0  # after so long a new process is better than waiting


class Front(Protocol):
    """The worker's front."""

    out_of_service: str  # why it refuses streams; empty: it does not

    def leave_service(self, reason: str) -> None:
        """End every stream and accept no new one."""


class EngineWatch:
    """Watches one engine process: call `unless_idle` while it loads, then `judge` a few times a second."""

    def __init__(self, config: WorkerConfig) -> None:
        self.memory = Heartbeat.create_memory()  # the process maps it, and the caller closes it
        self._heartbeat = Heartbeat(self.memory.fileno())
        self._settings = config.of(HangSettings)
        self._progress = ProgressWatch(self._settings.stall_seconds)
        self._pid = 0
        self._last = 0.0
        self._silent_seconds = 0.0
        self._hung_seconds = 0.0

    async def unless_idle(self, message: Coroutine[None, None, T], pid: int) -> T:
        """Await the first message of an engine that loads. Raises ConfigError if its process does nothing."""
        stall_seconds = self._settings.start_stall_seconds
        reading = asyncio.create_task(message)
        watch = StartWatch()
        self._pid, self._last = pid, time.monotonic()
        try:
            while not reading.done():
                await asyncio.wait([reading], timeout=START_WATCH_SECONDS)
                now = time.monotonic()
                # without time in which this process slept
                elapsed, self._last = min(now - self._last, 2 * START_WATCH_SECONDS), now
                if not reading.done() and watch.idle_seconds(sample_work(pid), elapsed) >= stall_seconds:
                    raise ConfigError(
                        f"the engine process has done nothing for {stall_seconds:.0f} s while loading: its files, "
                        "its GPU or a peer of its group may hang (--start-stall-seconds)"
                    )
            return reading.result()
        finally:
            reading.cancel()

    def judge(self, front: Front, now: float) -> None:
        """Take the front out of service while the engine hangs. Raises UnavailableError if it hangs for good."""
        trouble = self.trouble(now) or ""
        if trouble == front.out_of_service:
            return
        if trouble:
            logger.warning("out of service: %s", trouble)
            front.leave_service(trouble)
        else:
            logger.warning("in service again: the engine makes progress")
            front.out_of_service = ""

    def trouble(self, now: float) -> str | None:
        """Return why the engine is out of service; None: it is not. Raises UnavailableError if it hangs for good."""
        elapsed, self._last = min(now - self._last, MAX_INTERVAL_SECONDS), now
        trouble = None
        has_beaten = self._progress.has_beaten(self._heartbeat.read())
        self._silent_seconds = 0.0 if has_beaten else self._silent_seconds + elapsed
        if self._silent_seconds > IDLE_BEAT_SECONDS:
            trouble = self._progress.observe(sample_process(self._pid), elapsed)
        self._hung_seconds = self._hung_seconds + elapsed if trouble else 0.0
        if self._hung_seconds > HUNG_EXIT_SECONDS:
            raise UnavailableError(f"{trouble} for {self._hung_seconds:.0f} s")
        return trouble
