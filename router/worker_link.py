"""One worker, seen from the router: connect, shake hands, keep one Attach stream, notice when it is gone.

Delivers deltas and failures to the mailboxes of open attempts, KV events to the prefix index, load to its own
view. Knows nothing of clients, text or policy. `run` reconnects until it is cancelled; whenever the stream ends,
every open attempt fails with WorkerLostError, so that `dispatch` can move it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import (
    DeadlineExceededError,
    EngineError,
    HandshakeError,
    InvalidRequestError,
    MiniInferError,
    OverloadedError,
    UnavailableError,
)
from common.logging import traceback_text
from common.rpc import open_channel, token_metadata
from kvstore.index import PrefixIndex
from kvstore.types import BlockKey, WorkerId
from protos import decode_pb2_grpc, prefill_pb2_grpc
from protos import types_pb2 as pb
from router.breaker import Breaker
from router.mailbox import Mailbox
from router.policy import WorkerView
from router.rates import WorkerRates

logger = logging.getLogger(__name__)

CALL_TIMEOUT_SECONDS = 5.0
HEALTH_INTERVAL_SECONDS = 1.0
STALL_SECONDS = 15.0  # running requests and not one step: the engine hangs
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 2.0
REFUSED_BACKOFF_SECONDS = 5.0

AcceptWorker = Callable[["WorkerLink", pb.WorkerInfo], None]  # raises HandshakeError


class WorkerLostError(UnavailableError):
    """This worker cannot go on with the request; another one may."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One submission to one worker, open until `close`."""

    attempt_id: str
    link: WorkerLink
    mailbox: Mailbox
    num_prompt_tokens: int
    pending_tokens: int  # prompt tokens reserved on the worker until its first delta
    timer: asyncio.TimerHandle
    times: pb.RequestTimes | None = None
    is_over: bool = False  # the worker has said its last word on it

    def close(self) -> None:
        """Forget the attempt and tell the worker, unless it has ended there. KV that nobody took is released."""
        self.timer.cancel()
        self.link.forget(self)
        for delta in self.mailbox.close():
            if delta.HasField("kv_handle"):
                self.link.release(delta.kv_handle)


class WorkerLink:
    """Connection and mirror of the worker at `address`."""

    def __init__(
        self, role: str, address: str, accept: AcceptWorker, index: PrefixIndex, token: str, timeout_seconds: float
    ) -> None:
        self.role = role
        self.address = address
        self.info: pb.WorkerInfo | None = None  # set while the stream is open
        self.load = pb.LoadReport()
        self.rates = WorkerRates()
        self.breaker = Breaker()
        self.refused = ""  # why the handshake failed
        self.is_serving = False
        self.is_leaving = False  # its address is not listed any more
        self.num_lost = 0  # times the stream ended
        self._accept = accept
        self._index = index
        self._metadata = token_metadata(token)
        self._timeout = timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, Attempt] = {}
        self._pending_tokens = 0
        self._commands: asyncio.Queue[pb.Command] = asyncio.Queue()
        self._stub: Any = None
        self._last_sign = self._last_step_time = 0.0
        self._resync: asyncio.Task[None] | None = None

    # -- what dispatch and policy use --------------------------------------------------------------------------

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.info.worker_id if self.info else self.address)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_usable(self) -> bool:
        return self.info is not None and self.is_serving and not self.load.draining and not self.is_leaving

    def view(self) -> WorkerView:
        load = self.load
        used = load.kv_blocks_total - load.kv_blocks_free - load.kv_blocks_cached
        return WorkerView(
            worker_id=self.worker_id,
            num_running=max(load.num_running, len(self._open) - load.num_waiting),
            num_waiting=load.num_waiting + load.num_loading + load.num_swapped,
            queued_prefill_tokens=max(load.waiting_prefill_tokens, self._pending_tokens),
            prefill_tokens_per_second=self.rates.prefill_tokens_per_second,
            pull_tokens_per_second=self.rates.pull_tokens_per_second,
            step_seconds=self.rates.step_seconds,
            kv_used_share=used / load.kv_blocks_total if load.kv_blocks_total else 0.0,
            max_num_seqs=self.info.max_num_seqs if self.info else 1,
        )

    def open(self, submit: pb.Submit, pending_tokens: int, deadline: float) -> Attempt:
        """Submit to the worker. Raises WorkerLostError when the stream is not open."""
        if self.info is None:
            raise WorkerLostError(f"worker {self.address} is not connected")
        mailbox = Mailbox()
        timer = self._loop.call_later(
            deadline - time.monotonic(),
            mailbox.fail,
            DeadlineExceededError("the request took longer than it was given"),
        )
        attempt = Attempt(submit.request_id, self, mailbox, len(submit.prompt_token_ids), pending_tokens, timer)
        self._open[attempt.attempt_id] = attempt
        self._pending_tokens += pending_tokens
        self._commands.put_nowait(pb.Command(submit=submit))
        return attempt

    def forget(self, attempt: Attempt) -> None:
        if self._open.pop(attempt.attempt_id, None) is None:
            return
        self._settle(attempt)
        if not attempt.is_over and self.info is not None:
            self._commands.put_nowait(pb.Command(cancel=pb.Cancel(request_id=attempt.attempt_id)))

    def release(self, handle: pb.KvHandle) -> None:
        """Tell the worker that nobody will read this KV; without a connection its lease expires."""
        if self.info is not None and self.info.epoch == handle.epoch:
            self._commands.put_nowait(pb.Command(release=pb.Release(lease_id=handle.lease_id, epoch=handle.epoch)))

    async def drain(self, grace_seconds: float) -> int:
        """Ask the worker to take no more requests; how many it still has. Raises UnavailableError."""
        if self._stub is None:
            raise UnavailableError(f"worker {self.worker_id} is not connected")
        try:
            reply = await self._stub.Drain(
                pb.DrainRequest(grace_seconds=grace_seconds), timeout=CALL_TIMEOUT_SECONDS, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"worker {self.worker_id} refuses to drain: {error.code().name}") from None
        return int(reply.num_open_requests)

    # -- the connection ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the worker attached until cancelled."""
        backoff = MIN_BACKOFF_SECONDS
        while True:
            try:
                async with open_channel(self.address) as channel:
                    await self._attach(channel)
                reason = "the worker ended the stream"
            except HandshakeError as error:
                if str(error) != self.refused:
                    logger.error("worker %s refused: %s", self.address, error)
                self.refused, reason = str(error), ""
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name.lower().replace('_', ' ')}"
            except TimeoutError:
                reason = "no answer"
            except Exception as error:  # noqa: BLE001 - a bug in handling one report must not lose the worker for good
                logger.error("the link to worker %s failed\n%s", self.address, traceback_text(error))
                reason = "internal error"
            was_attached = self.info is not None
            self._lose(reason)
            backoff = MIN_BACKOFF_SECONDS if was_attached else min(backoff * 2, MAX_BACKOFF_SECONDS)
            pause = REFUSED_BACKOFF_SECONDS if self.refused else backoff
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))

    async def _attach(self, channel: grpc.aio.Channel) -> None:
        """One connection from handshake to end of stream."""
        stub_type: Any = prefill_pb2_grpc.PrefillStub if self.role == "prefill" else decode_pb2_grpc.DecodeStub
        stub = stub_type(channel)
        info = await stub.Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT_SECONDS, metadata=self._metadata)
        self._accept(self, info)
        self.refused = ""
        call = stub.Attach(metadata=self._metadata)
        async with asyncio.timeout(CALL_TIMEOUT_SECONDS):
            report = await call.read()
        if report is EOF:
            return
        self._commands = asyncio.Queue()
        self._stub, self.info = stub, info
        self._last_sign = self._last_step_time = time.monotonic()
        self.is_serving = True
        logger.info("%s worker %s attached (%s)", self.role, info.worker_id, self.address)
        helpers = [
            asyncio.create_task(self._send_commands(call)),
            asyncio.create_task(self._watch_health(channel, call)),
        ]
        try:
            while report is not EOF:
                self._apply(report)
                report = await call.read()
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise TimeoutError from None  # the health watch cancelled the call, not us
        finally:
            for helper in helpers:
                helper.cancel()
            call.cancel()

    async def _send_commands(self, call: Any) -> None:
        commands = self._commands
        try:
            while True:
                await call.write(await commands.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # the reader notices and reports why

    async def _watch_health(self, channel: grpc.aio.Channel, call: Any) -> None:
        """End the stream when the worker shows no sign of life, or no progress, for too long."""
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_SECONDS)
            try:
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=min(2.0, self._timeout / 2))
                self._last_sign = time.monotonic()
                self.is_serving = reply.status == health_pb2.HealthCheckResponse.SERVING
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                    self._last_sign = time.monotonic()
            now = time.monotonic()
            if now - self._last_sign > self._timeout:
                logger.warning("worker %s shows no sign of life for %.0f s", self.worker_id, now - self._last_sign)
                call.cancel()
            elif self._open and self.load.num_running and now - self._last_step_time > STALL_SECONDS:
                logger.warning("worker %s makes no progress for %.0f s", self.worker_id, now - self._last_step_time)
                call.cancel()

    # -- reports -----------------------------------------------------------------------------------------------

    def _apply(self, report: pb.StepReport) -> None:
        """One step of the worker: the hot path, once per step for all requests here."""
        now = self._last_sign = time.monotonic()
        opened = self._open
        for delta in report.deltas:
            attempt = opened.get(delta.request_id)
            if attempt is None:  # ended here while the step ran there
                if delta.HasField("kv_handle"):
                    self.release(delta.kv_handle)
                continue
            if attempt.is_over:
                continue  # nothing comes after the end
            if attempt.times is None:
                self._first_delta(attempt, delta)
            if delta.finish_reason:
                attempt.is_over = True
            attempt.mailbox.put(delta)
        for failure in report.failures:
            attempt = opened.get(failure.request_id)
            if attempt is not None:
                attempt.is_over = True
                if failure.code == pb.FAILURE_CODE_UNAVAILABLE:
                    self.breaker.record_failure(now)
                attempt.mailbox.fail(_error_of(failure))
        if report.HasField("load"):
            if report.load.num_steps != self.load.num_steps or not report.load.num_running:
                self._last_step_time = now
            self.load = report.load
            self.rates.observe_load(report.load)
        if report.kv_events:
            self._apply_events(report)

    def _first_delta(self, attempt: Attempt, delta: pb.TokenDelta) -> None:
        attempt.times = delta.times
        self._settle(attempt)
        self.rates.observe_times(attempt.num_prompt_tokens, delta.times)
        self.breaker.record_success()

    def _settle(self, attempt: Attempt) -> None:
        """Take back what was reserved for the attempt."""
        self._pending_tokens -= attempt.pending_tokens
        attempt.pending_tokens = 0

    def _apply_events(self, report: pb.StepReport) -> None:
        worker = self.worker_id
        complete = True
        for event in report.kv_events:
            kind = event.WhichOneof("kind")
            if kind == "snapshot":
                self._index.snapshot(worker, event.sequence, [BlockKey(key) for key in event.snapshot.keys])
                complete = True
            elif kind == "stored":
                complete = self._index.apply(worker, event.sequence, stored=map(BlockKey, event.stored.keys))
            elif kind == "removed":
                complete = self._index.apply(worker, event.sequence, removed=map(BlockKey, event.removed.keys))
        if not complete and (self._resync is None or self._resync.done()):
            self._resync = asyncio.create_task(self._fetch_snapshot())

    async def _fetch_snapshot(self) -> None:
        """After a gap: a second stream, whose first report is a snapshot. Open requests stay on the first one."""
        info, worker = self.info, self.worker_id
        if info is None:
            return  # lost in the meantime, and with it all that the index knew
        logger.warning("events of worker %s have a gap: fetching a snapshot", worker)
        call = self._stub.Attach(metadata=self._metadata, timeout=CALL_TIMEOUT_SECONDS)
        try:
            report = await call.read()
            for event in report.kv_events if report is not EOF else ():
                if event.HasField("snapshot") and self.info is info:
                    keys = [BlockKey(key) for key in event.snapshot.keys]
                    self._index.snapshot(worker, event.sequence, keys)
        except grpc.aio.AioRpcError as error:
            logger.warning("no snapshot from worker %s: %s", worker, error.code().name)
        finally:
            call.cancel()

    def _lose(self, reason: str) -> None:
        """The stream has ended: forget the worker's state and fail what is open here."""
        if self.info is None:
            return
        now = time.monotonic()
        logger.warning("lost %s worker %s: %s (%d open requests)", self.role, self.worker_id, reason, len(self._open))
        self._index.remove_worker(self.worker_id)
        lost, self._open = self._open, {}
        self.num_lost += 1
        self.breaker.record_failure(now)
        name = self.worker_id
        self.info, self._stub, self.is_serving = None, None, False
        self.load = pb.LoadReport()
        self._pending_tokens = 0
        for attempt in lost.values():
            attempt.pending_tokens = 0
            attempt.is_over = True
            attempt.mailbox.fail(WorkerLostError(f"the connection to worker {name} was lost"))


def _error_of(failure: pb.Failure) -> MiniInferError:
    """The exception that a worker's failure stands for."""
    match failure.code:
        case pb.FAILURE_CODE_INVALID_ARGUMENT if failure.param:
            return InvalidRequestError(failure.message, failure.param, failure.error_code or None)
        case pb.FAILURE_CODE_RESOURCE_EXHAUSTED:
            return OverloadedError(failure.message)
        case pb.FAILURE_CODE_UNAVAILABLE:
            return WorkerLostError(failure.message)
        case pb.FAILURE_CODE_DEADLINE_EXCEEDED:
            return DeadlineExceededError(failure.message)
        case pb.FAILURE_CODE_INTERNAL:
            return EngineError(failure.message)
        case _:  # between this router and the worker: nothing that a client could have caused, or should read
            code = pb.FailureCode.Name(failure.code) if failure.code in pb.FailureCode.values() else failure.code
            logger.error("a worker refused %s as %s: %s", failure.request_id, code, failure.message)
            return EngineError("a worker refused the request")
