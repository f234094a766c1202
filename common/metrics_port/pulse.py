"""Readiness of a gRPC server, for the metrics port's threads."""

from __future__ import annotations

import asyncio
import time

from common.net.rpc import RpcServer

BEAT_SECONDS = 0.5  # of the event loop
SILENT_SECONDS = 3.0


class Pulse:
    """What a health check would answer now: whether the server serves and the running event loop makes progress."""

    def __init__(self, server: RpcServer) -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self._beat()

    def __call__(self) -> bool:
        return self._server.health.is_serving and time.monotonic() - self._last_beat < SILENT_SECONDS

    def _beat(self) -> None:
        self._last_beat = time.monotonic()
        self._loop.call_later(BEAT_SECONDS, self._beat)
