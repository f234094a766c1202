"""The gRPC connection to one worker: handshake, one Attach stream, detection of its loss, reconnection.

Passes commands and reports between the stream and the worker's link, and knows nothing of their content.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from common.errors import HandshakeError, traceback_text
from common.net.rpc import open_channel, token_metadata
from common.wings import call_wing
from protos import decode_pb2_grpc, prefill_pb2_grpc
from protos import types_pb2 as pb
from router.config import RouterConfig
from router.workers.worker_link import WorkerLink
from router.workers.worker_stream import CALL_TIMEOUT_SECONDS, WorkerStream

logger = logging.getLogger(__name__)

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 2.0
REFUSED_BACKOFF_SECONDS = 5.0

AcceptWorker = Callable[[WorkerLink, pb.WorkerInfo], None]  # raises HandshakeError


class WorkerConnection:
    """Keeps `link` attached to its worker while `run` runs."""

    def __init__(self, link: WorkerLink, accept: AcceptWorker, config: RouterConfig) -> None:
        self._link = link
        self._accept = accept
        self._config = config
        self._metadata = token_metadata(config.cluster_token)

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
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name.lower().replace('_', ' ')}"
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    refused = error.details() or reason
            except TimeoutError:
                reason = "no answer"
            except Exception as error:  # noqa: BLE001 - a bug with one report must not lose the worker for good
                logger.error("the link to worker %s failed\n%s", link.address, traceback_text(error))
                reason = "internal error"
            if refused and refused != link.refused:
                logger.error("worker %s refused: %s", link.address, refused)
            link.refused = refused  # "" for a worker that is merely gone
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
        watches = call_wing("router.hangs.watches:start_watches", link, channel, call, self._config) or []
        helpers = [asyncio.create_task(_send_commands(call, stream)), *watches]
        try:
            while report is not EOF:
                link.apply(report)
                report = await call.read()
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise TimeoutError from None  # a helper cancelled the call
        finally:
            for helper in helpers:
                helper.cancel()
            call.cancel()


async def _send_commands(call: Any, stream: WorkerStream) -> None:
    try:
        while True:
            await call.write(await stream.commands.get())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        call.cancel()  # which ends the reader, and that reports the reason
