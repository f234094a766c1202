"""Watches one connection to a worker: whether the worker serves, and whether it shows signs of life."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.types import WorkerId
from router.config import RouterConfig
from router.hangs.settings import SilenceSettings

logger = logging.getLogger(__name__)
MAX_HEALTH_INTERVAL_SECONDS = 1.0
MIN_CHECKS = 4  # health checks of an idle worker in the time that it may be silent
SILENCE_INTERVAL_SECONDS = 0.25


class Watched(Protocol):
    """The watched worker's link."""

    last_sign: float
    """Time of the last report or health reply."""

    @property
    def worker_id(self) -> WorkerId: ...

    def set_serving(self, is_serving: bool) -> None: ...


def start_watches(
    link: Watched, channel: grpc.aio.Channel, call: Any, config: RouterConfig
) -> list[asyncio.Task[None]]:
    """Watch the worker at the other end of a channel until the tasks are cancelled. call: the worker's stream."""
    timeout = config.of(SilenceSettings).worker_timeout_seconds
    return [
        asyncio.create_task(_check_health(link, channel, timeout)),
        asyncio.create_task(_watch_silence(link, call, timeout)),
    ]


async def _check_health(link: Watched, channel: grpc.aio.Channel, timeout: float) -> None:
    """Ask the worker regularly whether it serves. A reply is also a sign of life."""
    stub = health_pb2_grpc.HealthStub(channel)
    interval = min(timeout / MIN_CHECKS, MAX_HEALTH_INTERVAL_SECONDS)
    while True:
        await asyncio.sleep(interval)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
            link.last_sign = time.monotonic()
            link.set_serving(reply.status == health_pb2.HealthCheckResponse.SERVING)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                link.last_sign = time.monotonic()


async def _watch_silence(link: Watched, call: Any, timeout: float) -> None:
    """Cancel the stream when the worker has shown no sign of life for too long."""
    seen, silent = link.last_sign, 0.0
    while True:
        before = time.monotonic()
        await asyncio.sleep(SILENCE_INTERVAL_SECONDS)
        # Time in which this process did not run does not count: unread signs of life may be waiting.
        silent += min(time.monotonic() - before, 2 * SILENCE_INTERVAL_SECONDS)
        if link.last_sign != seen:
            seen, silent = link.last_sign, 0.0
        if silent > timeout:
            logger.warning("worker %s shows no sign of life for %.1f s", link.worker_id, silent)
            call.cancel()
            return
