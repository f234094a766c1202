"""The process that computes: one engine, its KV pool and leases, in a loop that reads `receive -> step -> report`.

Started by the front with one end of a socket pair. It exits when the front is gone, so no memory outlives a worker.
It knows neither gRPC nor who asked; KV of peers arrives through `KvPuller`, in threads, between steps.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from common.errors import MiniInferError
from common.logging import RateLimit
from engine.assembly import EngineParts
from engine.request import FinishReason, Request, RequestId, RequestOutput
from kvstore.pool.leases import LeaseTable
from kvstore.transport.handle import HandleWriter, KvHandle, PeerLease, open_handle
from kvstore.types import Epoch, LeaseId
from worker.cores import SharedCores
from worker.frames import Event, FrameSocket, Op
from worker.heartbeat import Heartbeat
from worker.kv_exporter import KvExporter
from worker.kv_puller import KvPuller, LoadResult
from worker.report import Report, engine_counters, engine_load
from worker.wire import covers_request, request_kwargs

logger = logging.getLogger("engine")
logger.addFilter(RateLimit())
IDLE_WAIT_SECONDS = 0.5  # also the interval of reports without news
LEASE_WAIT_SECONDS = 0.1  # nothing to compute, but leases may expire
BLOCKED_WAIT_SECONDS = 0.002  # work is there but blocks are not: leases and loads will free some


@dataclass(slots=True)
class OpenRequest:
    """What the engine remembers of a request beside what the engine does."""

    request: Request
    arrived: float
    deadline: float  # monotonic; inf: none
    started: float = 0.0
    pull_seconds: float = 0.0
    pulled_tokens: int = 0
    transport: str = ""
    pull_failed: bool = False
    reported: bool = False


class EngineProcess:
    """Applies the front's messages to the engine and reports every turn of the loop in one message."""

    def __init__(
        self,
        link: FrameSocket,
        parts: EngineParts,
        epoch: Epoch,
        exporter: KvExporter,
        puller: KvPuller,
        handles: HandleWriter,
        lease_seconds: float,
        heartbeat: Heartbeat,
        cores: SharedCores | None = None,
    ):
        self._link = link
        self._engine = parts.engine
        self._pool = parts.engine.scheduler.kv.pool
        self._block_size = parts.geometry.block_size
        self._exporter = exporter
        self._puller = puller
        self._handles = handles
        self._lease_seconds = lease_seconds
        self._heartbeat = heartbeat
        self._cores = cores
        self._leases = LeaseTable(epoch)
        self._open: dict[RequestId, OpenRequest] = {}
        self._report_next = Report()
        self._stopping = False
        self._checked = True
        self._next_deadline_check = 0.0
        self._next_report_time = 0.0

    # -- loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until STOP arrives or the front is gone."""
        wait = 0.0
        while not self._stopping:
            self._receive(wait)
            self._heartbeat.beat()
            began = time.monotonic()
            self._apply_loads(began)
            self._expire(began)
            if self._cores is not None:
                self._cores.adjust(self._engine.has_work())
            num_steps = self._engine.num_steps
            outputs = self._engine.step()
            self._heartbeat.beat()
            self._start_loads(began)
            for new in self._engine.last_plan.new:
                open_request = self._open.get(new.request_id)
                if open_request is not None and not open_request.started:
                    open_request.started = began
            for output in outputs:
                self._report(output)
            stepped = self._engine.num_steps != num_steps
            self._send_report(time.monotonic() - began if stepped else 0.0)
            wait = self._next_wait(stepped)

    def _next_wait(self, stepped: bool) -> float:
        if stepped:
            self._checked = False
            return 0.0
        if self._engine.has_work():
            return BLOCKED_WAIT_SECONDS
        if self._puller.num_open or len(self._leases):
            return LEASE_WAIT_SECONDS
        self._engine.check()
        if not self._checked:
            self._pool.check_integrity()  # cheap enough when idle, and a bug found here is found early
            self._checked = True
        return IDLE_WAIT_SECONDS

    def _receive(self, timeout_seconds: float) -> None:
        for op, *rest in self._link.receive(timeout_seconds):
            if op == Op.SUBMIT:
                self._submit(rest[0], rest[1])
            elif op == Op.CANCEL:
                self._cancel(RequestId(rest[0]))
            elif op == Op.RENEW:
                self._leases.renew(LeaseId(rest[0]), Epoch(rest[1]), time.monotonic(), rest[2])
            elif op == Op.RELEASE:
                self._end_lease(LeaseId(rest[0]), Epoch(rest[1]))
            elif op == Op.STAGE:
                self._stage(LeaseId(rest[0]))
            elif op == Op.STOP:
                self._stopping = True

    # -- requests --------------------------------------------------------------------------------------------

    def _submit(self, name: str, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        lease = self._accept_handle(fields)
        try:
            request = self._engine.add_request(request_id=RequestId(name), **request_kwargs(fields, lease))
        except MiniInferError as error:
            self._report_next.add_error(name, error)
            if lease is not None:
                self._puller.abandon(lease)
            return
        deadline = now + fields["deadline_seconds"] if fields["deadline_seconds"] > 0 else float("inf")
        self._open[request.request_id] = OpenRequest(request, now, deadline)

    def _accept_handle(self, fields: dict[str, Any]) -> PeerLease | None:
        """The lease of the KV handle, kept alive; None without a useful one: the prompt is then computed here."""
        if fields["handle"] is None:
            return None
        try:
            lease = open_handle(KvHandle(**fields["handle"]))
        except MiniInferError as error:
            logger.warning("%s: computing the prompt here", error)
            return None
        self._puller.keep_alive(lease)
        if not covers_request(lease, fields, self._block_size):
            logger.warning("a KV handle does not cover its request: computing the prompt here")
            self._puller.abandon(lease)
            return None
        return lease

    def _cancel(self, request_id: RequestId) -> None:
        if self._open.pop(request_id, None) is None:
            return
        request = self._engine.abort(request_id)
        if request is not None and request.kv_source is not None:
            assert isinstance(request.kv_source, PeerLease)
            self._puller.abandon(request.kv_source)

    def _expire(self, now: float) -> None:
        for lease in self._leases.expire(now):
            logger.warning(
                "lease %s expired: nobody read the KV of %d blocks", lease.lease_id[:8], len(lease.block_ids)
            )
            self._exporter.end_export(lease)
            self._report_next.ended_leases.append(lease.lease_id)
        if now < self._next_deadline_check:
            return
        self._next_deadline_check = now + 0.1
        for request_id in [name for name, entry in self._open.items() if entry.deadline < now]:
            self._cancel(request_id)
            self._report_next.add_failure(request_id, "DEADLINE_EXCEEDED", "the request's time is over")

    # -- KV from peers ---------------------------------------------------------------------------------------

    def _start_loads(self, now: float) -> None:
        jobs = self._engine.scheduler.take_load_jobs()
        if jobs:
            self._exporter.fence()
        for job in jobs:
            lease = job.source
            assert isinstance(lease, PeerLease)
            entry = self._open.get(job.request.request_id)
            if not job.positions:
                self._puller.abandon(lease)
                continue
            if entry is not None:
                entry.started = now
                entry.pulled_tokens = lease.num_tokens - job.positions[0] * self._block_size
            self._puller.load(job.request.request_id, lease, job.positions, job.block_ids)

    def _apply_loads(self, now: float) -> None:
        for result in self._puller.take_results():
            self._apply_load(result, now)

    def _apply_load(self, result: LoadResult, now: float) -> None:
        self._engine.scheduler.finish_load(result.request_id, result.ok)
        entry = self._open.get(result.request_id)
        if entry is None and not result.ok:
            return  # cancelled, and its lease may have ended while it was read: no fault
        self._report_next.add_pull(result)
        if entry is None:
            return
        if not result.ok:
            logger.warning("KV pull failed, computing the prompt here: %s", result.error)
        entry.pull_seconds = now - entry.started
        entry.transport = result.transport
        entry.pull_failed = not result.ok
        if not result.ok:
            entry.pulled_tokens = 0

    def _end_lease(self, lease_id: LeaseId, epoch: Epoch) -> None:
        lease = self._leases.release(lease_id, epoch)
        if lease is not None:
            self._exporter.end_export(lease)
            self._report_next.ended_leases.append(lease_id)

    def _stage(self, lease_id: LeaseId) -> None:
        """A reader that cannot reach GPU memory wants this lease."""
        lease = self._leases.get(lease_id)
        rows = None if lease is None else self._exporter.stage(lease)
        if lease is not None and rows is None:
            logger.warning("no staging memory for %d KV blocks: raise --kv-staging-gb", len(lease.block_ids))
        self._report_next.staged.append([lease_id, rows])

    # -- reports ---------------------------------------------------------------------------------------------

    def _report(self, output: RequestOutput) -> None:
        request = output.request
        entry = self._open.get(request.request_id)
        if entry is None:
            return
        if output.error is not None or output.finish_reason is not None:
            del self._open[request.request_id]
        if output.error is not None:
            self._report_next.add_failure(request.request_id, "INTERNAL", output.error)
            return
        handle = self._grant(request) if output.finish_reason is FinishReason.PREFILLED else None
        times = None if entry.reported else self._times(entry)
        entry.reported = True
        self._report_next.add_output(output, handle, times)

    def _grant(self, request: Request) -> KvHandle:
        """Put the request's blocks under a lease."""
        block_ids = self._engine.scheduler.detach_blocks(request)
        digests = self._exporter.digests(block_ids)
        lease = self._leases.grant(block_ids, time.monotonic(), self._lease_seconds)
        self._report_next.add_lease(lease)
        return self._handles.write(lease, request.num_computed_tokens, digests)

    def _times(self, entry: OpenRequest) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "queue_seconds": max(entry.started - entry.arrived, 0.0),
            "kv_pull_seconds": entry.pull_seconds,
            "prefill_seconds": max(now - entry.started - entry.pull_seconds, 0.0),
            "num_cached_tokens": entry.request.num_cached_tokens,
            "num_pulled_tokens": entry.pulled_tokens,
            "transport": entry.transport,
            "kv_pull_failed": entry.pull_failed,
        }

    def _send_report(self, step_seconds: float) -> None:
        """Once a step, at once when there is news, and now and then without."""
        stored, removed = self._pool.take_events()
        now = time.monotonic()
        news = step_seconds or stored or removed or not self._report_next.is_empty
        if not news and now < self._next_report_time:
            return
        self._next_report_time = now + IDLE_WAIT_SECONDS
        load = engine_load(self._engine, len(self._leases), step_seconds)
        self._link.send([Event.STEP, self._report_next.frame(stored, removed, load, engine_counters(self._engine))])
        self._report_next = Report()
