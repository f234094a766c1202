"""Starts the engine's process and speaks frames with it. Knows nothing of requests or routers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

from common.errors import ConfigError, UnavailableError
from engine.config import EngineConfig
from engine.gpu.config import GpuConfig
from worker.config import WorkerConfig
from worker.frames import SOCKET_BUFFER_BYTES, Event, Op, pack, read_frame
from worker.heartbeat import Heartbeat

logger = logging.getLogger(__name__)
STOP_SECONDS = 5.0
# Threads of a GEMM spin this long for each other before they sleep: about 50 us, more than the time between two GEMMs
# of a step. libgomp's default, 300,000, is longer than a time slice, see decision 0097.
SPIN_COUNT = {"GOMP_SPINCOUNT": "2000"}


class EngineClient:
    """One child process with an engine. `start`, then `frames` until it ends."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        heartbeat: Heartbeat,
    ):
        self._process = process
        self.heartbeat = heartbeat
        self._reader = reader
        self._writer = writer
        self.ready: dict[str, Any] = {}

    @classmethod
    async def start(
        cls,
        worker: WorkerConfig,
        engine: EngineConfig,
        gpu: GpuConfig,
        worker_id: str,
        kv_address: str,
        run_dir: str,
    ) -> EngineClient:
        """Start the child and wait until its model is loaded. Raises ConfigError with its reason when it can't.

        kv_address: where peers reach this front's KvTransfer service.
        """
        ours, theirs = socket.socketpair()
        heartbeat_fd = Heartbeat.create_memory()
        with theirs, os.fdopen(heartbeat_fd, "rb+"):
            heartbeat = Heartbeat(heartbeat_fd)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "worker.engine_main",
                f"--fd={theirs.fileno()}",
                f"--heartbeat-fd={heartbeat_fd}",
                pass_fds=[theirs.fileno(), heartbeat_fd],
                stdin=asyncio.subprocess.DEVNULL,
                env=SPIN_COUNT | os.environ,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=SOCKET_BUFFER_BYTES)
        client = cls(process, reader, writer, heartbeat)
        client._send(
            Op.START,
            {
                "engine": dataclasses.asdict(engine),
                "gpu": dataclasses.asdict(gpu),
                "worker_id": worker_id,
                "kv_address": kv_address,
                "run_dir": run_dir,
                "agent_socket": worker.agent_socket,
                "cluster_token": worker.cluster_token,
                "kv_lease_seconds": worker.kv_lease_seconds,
                "kv_staging_gb": worker.kv_staging_gb,
                "kv_transport": worker.kv_transport,
                "log_level": worker.log_level,
            },
        )
        try:
            event, body = await read_frame(reader)
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await process.wait()
            if status == -signal.SIGKILL:
                raise ConfigError(
                    "the engine process was killed while loading, most likely because host memory ended: give it "
                    "more, choose a smaller model, or lower --kv-staging-gb (on a CPU --kv-cache-gb)"
                ) from None
            raise ConfigError(f"the engine process ended with status {status} while loading") from None
        if event == Event.FAILED:
            await process.wait()
            raise ConfigError(body)
        client.ready = body
        return client

    @property
    def pid(self) -> int:
        return self._process.pid

    async def frames(self) -> AsyncIterator[dict[str, Any]]:
        """The engine's reports. Raises UnavailableError when it is gone."""
        while True:
            try:
                event, body = await read_frame(self._reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                raise UnavailableError("the engine process is gone") from None
            if event == Event.FAILED:
                raise UnavailableError(f"the engine process ends: {body}")
            yield body

    def submit(self, name: str, fields: dict[str, Any]) -> None:
        self._send(Op.SUBMIT, name, fields)

    def cancel(self, name: str) -> None:
        self._send(Op.CANCEL, name)

    def renew(self, lease_id: str, epoch: int, lease_seconds: float) -> None:
        self._send(Op.RENEW, lease_id, epoch, lease_seconds)

    def release(self, lease_id: str, epoch: int) -> None:
        self._send(Op.RELEASE, lease_id, epoch)

    def stage(self, lease_id: str) -> None:
        self._send(Op.STAGE, lease_id)

    async def stop(self) -> None:
        """Ask it to end, then make it end."""
        if self._process.returncode is None:
            self._send(Op.STOP)
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            logger.warning("the engine process does not stop: killing it")
            self._process.kill()
            await self._process.wait()
        self._writer.close()

    def _send(self, *message: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(pack(list(message)))
