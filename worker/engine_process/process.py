"""The engine process: one engine with its KV pool and leases, in a loop `receive -> step -> report`.

The front starts it with one end of a socket pair. It exits when the front is gone, so no memory outlives a worker.
It knows neither gRPC nor routers. Threads of `KvPuller` pull the KV of peers; it becomes usable between steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from math import inf

from common.errors import GRAMMAR_REFUSED, DeadlineExceededError, EngineError, InvalidRequestError, MiniInferError
from common.logging import RateLimit
from common.token_ids import num_ids
from engine.engine import Engine
from engine.request import FinishReason, RequestId, RequestOutput
from engine.scheduled_step import StepStats
from kvstore.types import Epoch, LeaseId
from protos import types_pb2 as pb
from worker.engine_process.figures import OpenRequest, add_figures
from worker.frames import FrameSocket
from worker.kv.kv_leases import KvLeases, PromptLeases
from worker.kv.kv_loads import KvLoads
from worker.messages import Command, Delta, Renew, Stage, StepReport, Stop, ToEngine
from worker.protobuf import failure_of, request_of

logger = logging.getLogger("engine")
logger.addFilter(RateLimit())
IDLE_WAIT_SECONDS = 0.5  # also the interval between reports without news
LEASE_WAIT_SECONDS = 0.1  # there is nothing to compute, but leases may expire
BLOCKED_WAIT_SECONDS = 0.002  # there is work but no blocks: leases and loads will free some


class EngineProcess:
    """Applies the front's messages to the engine, and reports each iteration of the loop in one message."""

    def __init__(
        self,
        link: FrameSocket,
        engine: Engine,
        leases: KvLeases,
        prompt_leases: PromptLeases,
        loads: KvLoads,
        beat: Callable[[], None],
        adjust_cores: Callable[[bool], None] | None = None,
    ) -> None:
        """beat: called to show that the loop makes progress.

        adjust_cores: called before each step with whether there is work.
        """
        self._link = link
        self._engine = engine
        self._pool = engine.kv.pool
        self._leases = leases
        self._prompt_leases = prompt_leases
        self._loads = loads
        self._beat = beat
        self._adjust_cores = adjust_cores
        self._open: dict[RequestId, OpenRequest] = {}
        self._report = StepReport()  # of this iteration
        self._stopping = False
        self._idle_since: float | None = None
        self._checked = True
        self._next_deadline_check = 0.0
        self._next_report_time = 0.0

    # -- loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until Stop arrives. Raises ConnectionError when the front is gone."""
        wait = 0.0
        while not self._stopping:
            for message in self._link.receive(wait):
                self._receive(message)
            self._beat()
            num_steps = self._engine.num_steps
            self._send_report(self._step())
            wait = self._next_wait(stepped=self._engine.num_steps != num_steps)
        self._loads.close()

    def _step(self) -> StepStats | None:
        """Run one engine step, after making KV that has arrived from peers usable."""
        now = time.monotonic()
        self._loads.finish(self._open, self._report, now)
        self._expire(now)
        if self._adjust_cores is not None:
            self._adjust_cores(self._engine.has_work())
        outcome = self._engine.step(partial(self._loads.start, requests=self._open, now=now))
        self._beat()
        self._loads.start_after_steps(outcome.loads, self._open, now)
        for new in outcome.plan.new:
            entry = self._open.get(new.request_id)
            if entry is not None and not entry.started:
                entry.started = now
        for output in outcome.outputs:
            self._add_output(output)
        for lease, offer in self._prompt_leases.lease_parts(outcome.prompt_chunks, self._open, time.monotonic()):
            self._report.granted.append(lease)
            self._report.offers.append(offer.SerializeToString())
        return outcome.stats

    def _next_wait(self, stepped: bool) -> float:
        if stepped:
            self._checked, self._idle_since = False, None
            return 0.0
        if self._engine.has_work():
            return BLOCKED_WAIT_SECONDS
        if self._loads.num_open or len(self._leases):
            return LEASE_WAIT_SECONDS
        self._engine.check()
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        if not self._checked and now - self._idle_since >= IDLE_WAIT_SECONDS:
            # Finds bugs early. It takes 20 ms with 100,000 blocks, so it runs only in longer idle times.
            self._pool.check_integrity()
            self._checked = True
        return IDLE_WAIT_SECONDS

    def _receive(self, message: ToEngine) -> None:
        match message:
            case Command(data):
                self._carry_out(pb.Command.FromString(data))
            case Renew(lease_id, epoch, lease_seconds):
                self._leases.renew(lease_id, epoch, time.monotonic(), lease_seconds)
            case Stage(lease_id, first):
                self._report.staged.append((lease_id, first, self._leases.stage(lease_id, first)))
            case Stop():
                self._stopping = True

    def _carry_out(self, command: pb.Command) -> None:
        match command.WhichOneof("kind"):
            case "submit":
                self._submit(command.submit)
            case "cancel":
                self._cancel(RequestId(command.cancel.request_id))
            case "hand_over":
                self._engine.hand_over(RequestId(command.hand_over.request_id))
            case "prefetch":
                self._loads.prefetch(command.prefetch)
            case "release":
                lease_id = LeaseId(command.release.lease_id)
                if self._leases.release(lease_id, Epoch(command.release.epoch)):
                    self._report.ended_leases.append(lease_id)

    # -- requests --------------------------------------------------------------------------------------------

    def _submit(self, submit: pb.Submit) -> None:
        request_id, now = RequestId(submit.request_id), time.monotonic()
        num_tokens = num_ids(submit.prompt_token_ids) + len(submit.output_token_ids) - 1  # computes the last itself
        handle = submit.kv_handle if submit.HasField("kv_handle") else None
        lease = self._loads.accept(handle, num_tokens, request_id)
        try:
            request = request_of(submit, now)
            if lease is not None:
                request.kv_source, request.num_source_tokens = lease, lease.num_tokens
            self._engine.submit(request)
        except MiniInferError as error:
            self._fail(request_id, error)
            self._loads.abandon(lease)
            return
        deadline = now + submit.deadline_seconds if submit.deadline_seconds > 0 else inf
        self._open[request_id] = OpenRequest(request, now, deadline)

    def _cancel(self, request_id: RequestId) -> None:
        if self._open.pop(request_id, None) is None:
            return
        request = self._engine.abort(request_id)
        if request is not None:
            self._loads.abandon(request.kv_source)

    def _expire(self, now: float) -> None:
        self._report.ended_leases += self._leases.expire(now)
        if now < self._next_deadline_check:
            return
        self._next_deadline_check = now + 0.1
        for request_id in [name for name, entry in self._open.items() if entry.deadline < now]:
            self._cancel(request_id)
            self._fail(request_id, DeadlineExceededError("deadline exceeded"))

    # -- reports ---------------------------------------------------------------------------------------------

    def _fail(self, request_id: RequestId, error: MiniInferError) -> None:
        self._report.failures.append(failure_of(error, request_id).SerializeToString())

    def _add_output(self, output: RequestOutput) -> None:
        request, now = output.request, time.monotonic()
        entry = self._open.get(request.request_id)
        if entry is None:
            return
        if output.error is not None or output.finish_reason is not None:
            del self._open[request.request_id]
        if output.error is not None:
            self._fail(request.request_id, _error_of(output.error))
            return
        handle = None
        if output.finish_reason is FinishReason.PREFILLED:
            lease, written = self._prompt_leases.lease_prompt(entry, now)
            handle = written.SerializeToString()
            self._report.granted.append(lease)
        times = entry.take_times(now)
        delta = Delta(
            request.request_id, output.new_token_ids, output.finish_reason, output.stop_token_id,
            output.logprobs, output.prompt_logprobs, handle, None if times is None else times.SerializeToString(),
        )  # fmt: skip
        if output.finish_reason is not None:
            delta.num_draft_tokens, delta.num_accepted_tokens = request.num_draft_tokens, request.num_accepted_tokens
        self._report.deltas.append(delta)

    def _send_report(self, stats: StepStats | None) -> None:
        """Send the report if a step has ended or there is news, and otherwise every IDLE_WAIT_SECONDS."""
        report, now = self._report, time.monotonic()
        report.stored, report.removed = self._pool.take_events()
        if not (stats or report.has_news) and now < self._next_report_time:
            return
        self._next_report_time = now + IDLE_WAIT_SECONDS
        add_figures(report, self._engine, len(self._leases), stats or StepStats())
        self._link.send(report)
        self._report = StepReport()


def _error_of(message: str) -> MiniInferError:
    """Convert a row's error message; one about the client's grammar becomes an InvalidRequestError."""
    if message.startswith(GRAMMAR_REFUSED):
        return InvalidRequestError(message, "structured_outputs")
    return EngineError(message)
