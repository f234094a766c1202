"""A worker's front: routers' Attach streams on one side, the engine's socket on the other. No torch, no scheduling.

Gives each request a name of its own (a router's id is only a label), turns one frame of the engine process into one
StepReport per router, mirrors leases for `KvTransfer`, and watches that process: when it dies, every stream ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from common.errors import UnavailableError
from common.logging import RateLimit
from kvstore.pool.events import EventLog, to_proto
from kvstore.pool.leases import LeaseMirror
from kvstore.transport.staging import StagingTable
from protos import types_pb2 as pb
from worker.engine_client import EngineClient
from worker.protobuf import failure, submit_fields, token_delta
from worker.sessions import Session, kv_handles

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())
LOAD_INTERVAL_SECONDS = 0.1  # between reports to a router that has nothing in a step
ReportListener = Callable[[dict[str, Any]], None]


class WorkerFront:
    """State of one worker that routers can see."""

    def __init__(
        self,
        engine: EngineClient,
        leases: LeaseMirror,
        info: pb.WorkerInfo,
        staging: StagingTable | None = None,
    ) -> None:
        self.info = info
        self._staging = staging
        self.draining = False
        self.is_stopping = False  # draining, and nothing can undo it
        self._drain_deadline = 0.0
        self._out_of_service = ""  # the reason, while streams are refused
        self.leases = leases
        self.load: dict[str, Any] = {}
        self._engine = engine
        self._events = EventLog()
        self._sessions: set[Session] = set()
        self._owner: dict[str, tuple[Session, str]] = {}  # the engine's name -> (session, router's id)
        self._names = itertools.count()
        self._listeners: list[ReportListener] = []

    @property
    def num_open_requests(self) -> int:
        return len(self._owner)

    def add_listener(self, listener: ReportListener) -> None:
        """Call `listener` with each frame of the engine (metrics)."""
        self._listeners.append(listener)

    # -- the router's side -----------------------------------------------------------------------------------

    async def attach(self, commands: AsyncIterator[pb.Command], prefill_only: bool) -> AsyncIterator[pb.StepReport]:
        """Serve one router until it leaves, falls behind, or this worker goes out of service (UnavailableError)."""
        if self._out_of_service:
            raise UnavailableError(self._out_of_service)
        session = Session()
        self._sessions.add(session)
        session.send(pb.StepReport(kv_events=[to_proto(self._events.snapshot())], load=self._load_report()))
        reader = asyncio.create_task(self._read_commands(session, commands, prefill_only))
        try:
            while (report := await session.reports.get()) is not None:
                yield report
        finally:
            reader.cancel()
            self._close(session)
        if session.closed_reason:
            raise UnavailableError(session.closed_reason)

    async def _read_commands(self, session: Session, commands: AsyncIterator[pb.Command], prefill_only: bool) -> None:
        async for command in commands:
            if command.HasField("submit"):
                self._submit(session, command.submit, prefill_only)
            elif command.HasField("cancel"):
                self._cancel(session, command.cancel.request_id)
            elif command.HasField("release"):
                self._engine.release(command.release.lease_id, command.release.epoch)
        session.close("")  # the router has said goodbye

    def _submit(self, session: Session, submit: pb.Submit, prefill_only: bool) -> None:
        if self.draining:
            refusal = failure(submit.request_id, "UNAVAILABLE", "this worker is draining")
            session.send(pb.StepReport(failures=[refusal], load=self._load_report()))
            return
        if submit.request_id in session.names:
            refusal = failure(submit.request_id, "INTERNAL", "this request id is in use")
            session.send(pb.StepReport(failures=[refusal]))
            return
        name = f"{submit.request_id[:64]}.{next(self._names)}"
        session.names[submit.request_id] = name
        self._owner[name] = (session, submit.request_id)
        self._engine.submit(name, submit_fields(submit, prefill_only))

    def _cancel(self, session: Session, request_id: str) -> None:
        name = session.names.pop(request_id, None)
        if name is not None:
            del self._owner[name]
            self._engine.cancel(name)

    def _close(self, session: Session) -> None:
        self._sessions.discard(session)
        for request_id in list(session.names):
            self._cancel(session, request_id)
        self._release(session.unsent_handles())

    def _release(self, handles: Iterable[pb.KvHandle]) -> None:
        """Free KV that its router will not hear of, or not in time."""
        for handle in handles:
            self._engine.release(handle.lease_id, handle.epoch)

    # -- in and out of service -------------------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """Whether new requests are welcome."""
        return not (self.draining or self._out_of_service)

    def drain(self, grace_seconds: float) -> None:
        """Take no more requests; the worker ends when the open ones have, at the latest after `grace_seconds`."""
        if not self.is_stopping:
            self.draining = True
            self._drain_deadline = time.monotonic() + grace_seconds
            logger.info("draining: %d requests, %d leases", self.num_open_requests, self.leases.num_leases)

    def stop(self, grace_seconds: float) -> None:
        """Drain for good."""
        self.drain(grace_seconds)
        self.is_stopping = True

    def undrain(self) -> None:
        """Take requests again. Raises UnavailableError when the worker is about to stop."""
        if self.is_stopping:
            raise UnavailableError("the worker is stopping")
        self.draining = False

    def is_drained(self, now: float) -> bool:
        """Whether a draining worker has nothing left to finish, or no time left for it."""
        is_idle = not (self.num_open_requests or self.leases.num_leases)
        return self.draining and (is_idle or now >= self._drain_deadline)

    def set_trouble(self, reason: str | None) -> None:
        """What keeps the engine from getting on, if anything does: out of service until that is over."""
        if (reason or "") == self._out_of_service:
            return
        if reason:
            logger.warning("out of service: %s", reason)
            self.leave_service(reason)
        else:
            logger.warning("in service again: the engine gets on")
            self._out_of_service = ""

    def leave_service(self, reason: str) -> None:
        """End every stream and accept no new one; routers move their requests elsewhere."""
        self._out_of_service = reason
        for session in list(self._sessions):
            session.close(reason)

    # -- the engine's side -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Apply the engine's frames until it is gone. Raises UnavailableError then."""
        try:
            async for frame in self._engine.frames():
                self._apply(frame)
        finally:
            self.leave_service("the worker's engine stopped")

    def _apply(self, frame: dict[str, Any]) -> None:
        now = time.monotonic()
        self.load = frame["load"]
        for lease_id, block_ids, deadline in frame["granted"]:
            self.leases.grant(lease_id, block_ids, deadline)
        for lease_id in frame["ended_leases"]:
            self.leases.end(lease_id)
        if self._staging is not None:
            for lease_id, rows in frame["staged"]:
                self._staging.answer(lease_id, rows)
            for lease_id in frame["ended_leases"]:
                self._staging.end(lease_id)
        reports: dict[Session, pb.StepReport] = defaultdict(pb.StepReport)
        for fields in frame["deltas"]:
            owner = self._owner.get(fields[0])
            if owner is None:  # cancelled while the step ran
                if fields[6] is not None:  # a KV handle
                    self._engine.release(fields[6]["lease_id"], fields[6]["epoch"])
                continue
            session, request_id = owner
            reports[session].deltas.append(token_delta(fields, request_id))
            if fields[2] is not None:
                self._forget(fields[0])
        for name, *fields in frame["failures"]:
            owner = self._owner.get(name)
            if owner is not None:
                reports[owner[0]].failures.append(failure(owner[1], *fields))
                self._forget(name)
        events = self._events.append(frame["stored"], frame["removed"])
        self._send(reports, [to_proto(event) for event in events], now)
        for listener in self._listeners:
            listener(frame)

    def _forget(self, name: str) -> None:
        session, request_id = self._owner.pop(name)
        session.names.pop(request_id, None)

    def _send(self, reports: dict[Session, pb.StepReport], events: list[pb.KvEvent], now: float) -> None:
        load = self._load_report()
        for session in list(self._sessions):
            if session not in reports and not events and now - session.last_report_time < LOAD_INTERVAL_SECONDS:
                continue
            report = reports[session]
            report.step = self.load["num_steps"]
            report.load.CopyFrom(load)
            report.kv_events.extend(events)
            session.last_report_time = now
            if not session.send(report):
                logger.warning("a router does not read its reports: closing its stream")
                self._close(session)
                self._release(kv_handles(report))
                session.close("the router does not keep up")

    def heartbeat(self) -> None:
        """Tell routers that this worker lives, also while a long step runs. Called a few times a second."""
        if self.load and not self._out_of_service:
            self._send(defaultdict(pb.StepReport), [], time.monotonic())

    def _load_report(self) -> pb.LoadReport:
        return pb.LoadReport(**self.load, draining=self.draining)
