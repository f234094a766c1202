"""The gRPC connection to one worker: shake hands, keep one Attach stream, notice when it is gone, connect again.

Passes commands and reports between the stream and the worker's link, and knows nothing of what they say.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import HandshakeError, traceback_text
from common.net.rpc import open_channel, token_metadata
from protos import decode_pb2_grpc, prefill_pb2_grpc
from protos import types_pb2 as pb
from router.workers.worker_link import WorkerLink
from router.workers.worker_stream import CALL_TIMEOUT_SECONDS, WorkerStream

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_SECONDS = 1.0
SILENCE_INTERVAL_SECONDS = 0.25
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 2.0
REFUSED_BACKOFF_SECONDS = 5.0

AcceptWorker = Callable[[WorkerLink, pb.WorkerInfo], None]  # raises HandshakeError


class WorkerConnection:
    """Keeps `link` attached to its worker while `run` runs."""

    def __init__(self, link: WorkerLink, accept: AcceptWorker, token: str, timeout_seconds: float) -> None:
        self._link = link
        self._accept = accept
        self._metadata = token_metadata(token)
        self._timeout = timeout_seconds

    async def run(self) -> None:
        """Keep the worker attached until cancelled."""
        link = self._link
        backoff = MIN_BACKOFF_SECONDS
        while True:
            refused = ""
            try:
                async with open_channel(link.address) as channel:
                    await self._attach(channel)
                reason = "the worker ended the stream"
            except HandshakeError as error:
                refused, reason = str(error), ""
                if refused != link.refused:
                    logger.error("worker %s refused: %s", link.address, error)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name.lower().replace('_', ' ')}"
            except TimeoutError:
                reason = "no answer"
            except Exception as error:  # noqa: BLE001 - a bug in handling one report must not lose the worker for good
                logger.error("the link to worker %s failed\n%s", link.address, traceback_text(error))
                reason = "internal error"
            link.refused = refused  # not one that is gone
            was_attached = link.info is not None
            link.lost(reason)
            backoff = MIN_BACKOFF_SECONDS if was_attached else min(backoff * 2, MAX_BACKOFF_SECONDS)
            pause = REFUSED_BACKOFF_SECONDS if link.refused else backoff
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))

    async def _attach(self, channel: grpc.aio.Channel) -> None:
        """Run one connection, from the handshake to the end of the stream."""
        link = self._link
        stub_type: Any = prefill_pb2_grpc.PrefillStub if link.listed_role == "prefill" else decode_pb2_grpc.DecodeStub
        stub = stub_type(channel)
        info = await stub.Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT_SECONDS, metadata=self._metadata)
        self._accept(link, info)
        link.refused = ""
        call = stub.Attach(metadata=self._metadata)
        async with asyncio.timeout(CALL_TIMEOUT_SECONDS):
            report = await call.read()
        if report is EOF:
            return
        stream = WorkerStream(stub, self._metadata, info.worker_id)
        link.attached(info, stream)
        helpers = [
            asyncio.create_task(_send_commands(call, stream)),
            asyncio.create_task(self._check_health(channel)),
            asyncio.create_task(self._watch_silence(call)),
        ]
        try:
            while report is not EOF:
                link.apply(report)
                report = await call.read()
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise TimeoutError from None  # the silence watch cancelled the call, not us
        finally:
            for helper in helpers:
                helper.cancel()
            call.cancel()

    async def _check_health(self, channel: grpc.aio.Channel) -> None:
        """Ask the worker now and then whether it serves. An answer is a sign of life, too."""
        link = self._link
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_SECONDS)
            try:
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._timeout)
                link.last_sign = time.monotonic()
                link.set_serving(reply.status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                    link.last_sign = time.monotonic()

    async def _watch_silence(self, call: Any) -> None:
        """End the stream when the worker shows no sign of life for too long."""
        link = self._link
        seen, silent = link.last_sign, 0.0
        while True:
            before = time.monotonic()
            await asyncio.sleep(SILENCE_INTERVAL_SECONDS)
            # Time in which this process did not run says nothing of the worker: signs may be waiting to be read.
            silent += min(time.monotonic() - before, 2 * SILENCE_INTERVAL_SECONDS)
            if link.last_sign != seen:
                seen, silent = link.last_sign, 0.0
            if silent > self._timeout:
                logger.warning("worker %s shows no sign of life for %.1f s", link.worker_id, silent)
                call.cancel()
                return


async def _send_commands(call: Any, stream: WorkerStream) -> None:
    try:
        while True:
            await call.write(await stream.commands.get())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        call.cancel()  # the reader notices and reports why
