"""A worker's front, between routers' Attach streams and the engine process. No torch, no scheduling.

Splits each report of the engine process into one per router, mirrors leases for `KvTransfer`, and ends every stream
when the engine process dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from common.errors import EngineError, MiniInferError, UnavailableError, traceback_text
from common.logging import RateLimit
from common.wings import call_wing, from_wing
from kvstore.pool.leases import LeaseTable
from kvstore.types import Epoch
from protos import types_pb2 as pb
from worker.front.engine_client import EngineClient
from worker.front.sessions import EventLog, Session, kv_handles
from worker.messages import Command, StepReport
from worker.protobuf import failure_of, token_delta

if TYPE_CHECKING:
    from worker.drains.drain import Drain

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())
LOAD_INTERVAL_SECONDS = 0.1  # between reports to a router without requests in the steps


class WorkerFront:
    """The front of one worker, with the state that routers see."""

    def __init__(self, engine: EngineClient, info: pb.WorkerInfo) -> None:
        self.info = info
        self.listeners: list[Callable[[StepReport], None]] = []  # called with each report of the engine process
        self.drain: Drain | None = call_wing("worker.drains.drain:Drain")
        self.out_of_service = ""  # why streams are refused; empty: they are not
        self.leases = LeaseTable(Epoch(info.epoch))  # as of the last report
        self.load = pb.LoadReport()  # the engine's part, as of the last report
        self._memory = pb.LoadReport()  # memory of both processes
        self._engine = engine
        self._events = EventLog()
        self._sessions: set[Session] = set()
        self._owner: dict[str, Session] = {}  # by open request

    @property
    def num_open_requests(self) -> int:
        return len(self._owner)

    # -- the router's side -----------------------------------------------------------------------------------

    async def attach(self, commands: AsyncIterator[pb.Command]) -> AsyncIterator[pb.StepReport]:
        """Serve one router until it leaves, falls behind, or this worker goes out of service (UnavailableError)."""
        if self.out_of_service:
            raise UnavailableError(self.out_of_service)
        session = Session()
        self._sessions.add(session)
        session.send(pb.StepReport(kv_events=[self._events.snapshot()], load=self._load_report()))
        reader = asyncio.create_task(self._read_commands(session, commands))
        try:
            while (report := await session.reports.get()) is not None:
                yield report
        finally:
            reader.cancel()
            self._close(session)
        if session.closed_reason:
            raise UnavailableError(session.closed_reason)

    async def _read_commands(self, session: Session, commands: AsyncIterator[pb.Command]) -> None:
        reason = ""  # the router has ended the stream
        try:
            async for command in commands:
                self._carry_out(session, command)
        except Exception as error:  # noqa: BLE001 - a bug; unless the stream ends, the router waits for answers in vain
            logger.error("a router's command failed\n%s", traceback_text(error))
            reason = "a command could not be carried out"
        session.close(reason)

    def _carry_out(self, session: Session, command: pb.Command) -> None:
        match command.WhichOneof("kind"):
            case "submit":
                self._submit(session, command)
            case "cancel":
                self._cancel(session, command.cancel.request_id)
            case "hand_over":
                if self._owner.get(command.hand_over.request_id) is session:
                    self._tell(command)
            case "release":
                self.release(command.release)
            case "drain_noted":
                session.num_drain_changes = command.drain_noted.num_drain_changes
            case "prefetch":
                if self.is_draining:
                    del command.prefetch.block_keys[:]
                self._tell(command)

    def _tell(self, command: pb.Command) -> None:
        """Send the engine process a command."""
        self._engine.send(Command(command.SerializeToString()))

    def _submit(self, session: Session, command: pb.Command) -> None:
        request_id = command.submit.request_id
        if self.is_draining:
            self._refuse(session, request_id, UnavailableError("this worker is draining"))
        elif request_id in self._owner:
            self._refuse(session, request_id, EngineError("this request id is in use"))
        else:
            self._owner[request_id] = session
            self._tell(command)

    def _refuse(self, session: Session, request_id: str, error: MiniInferError) -> None:
        session.send(pb.StepReport(failures=[failure_of(error, request_id)], load=self._load_report()))

    def _cancel(self, session: Session, request_id: str) -> None:
        if self._owner.get(request_id) is session:
            del self._owner[request_id]
            self._tell(pb.Command(cancel=pb.Cancel(request_id=request_id)))

    def _close(self, session: Session) -> None:
        self._sessions.discard(session)
        for request_id in [name for name, owner in self._owner.items() if owner is session]:
            self._cancel(session, request_id)
        self.release(*session.unsent_handles())

    def release(self, *leases: pb.KvHandle | pb.Release) -> None:
        """Release leases that nobody will read, for example because the router is gone."""
        for lease in leases:
            self._tell(pb.Command(release=pb.Release(lease_id=lease.lease_id, epoch=lease.epoch)))

    # -- in and out of service -------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        return self.drain is not None and self.drain.is_active

    @property
    def is_serving(self) -> bool:
        """Whether the worker accepts new requests."""
        return not (self.is_draining or self.out_of_service)

    @property
    def is_drained(self) -> bool:
        """Whether a drain is over: nothing is open or on its way here, or its time is up, see `Drain`."""
        is_idle = not (self.num_open_requests or self.leases)
        return self.drain is not None and self.drain.is_over(self._sessions, is_idle, time.monotonic())

    def leave_service(self, reason: str) -> None:
        """End every stream and accept no new one; routers move their requests to other workers."""
        self.out_of_service = reason
        for session in list(self._sessions):
            session.close(reason)

    # -- the engine's side -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Apply the reports of the engine process until it is gone, and then raise UnavailableError."""
        try:
            async for report in self._engine.reports():
                self._apply(report)
        finally:
            self.leave_service("the worker's engine stopped")

    def _apply(self, report: StepReport) -> None:
        self.load = pb.LoadReport.FromString(report.load)
        for lease in report.granted:
            self.leases.adopt(lease)
        for lease_id in report.ended_leases:
            self.leases.release(lease_id, self.leases.epoch)
        reports: dict[Session, pb.StepReport] = defaultdict(pb.StepReport)
        for offer in map(pb.KvOffer.FromString, report.offers):
            if session := self._owner.get(offer.request_id):
                reports[session].kv_offers.append(offer)
            else:  # cancelled while the step ran
                self.release(offer.kv_handle)
        for delta in report.deltas:
            session = self._owner.get(delta.request_id)
            if session is None:  # cancelled while the step ran
                if delta.handle is not None:
                    self.release(pb.KvHandle.FromString(delta.handle))
                continue
            reports[session].deltas.append(token_delta(delta))
            if delta.finish_reason is not None:
                del self._owner[delta.request_id]
        for failure in map(pb.Failure.FromString, report.failures):
            if session := self._owner.pop(failure.request_id, None):
                reports[session].failures.append(failure)
        self._send(reports, self._events.append(report.stored, report.removed))
        for listener in self.listeners:
            listener(report)

    def _send(self, reports: dict[Session, pb.StepReport], events: list[pb.KvEvent]) -> None:
        load, now = self._load_report(), time.monotonic()
        for session in list(self._sessions):
            if session not in reports and not events and now - session.last_report_time < LOAD_INTERVAL_SECONDS:
                continue
            report = reports[session]
            report.load.CopyFrom(load)
            report.kv_events.extend(events)
            session.last_report_time = now
            if not session.send(report):
                logger.warning("a router does not read its reports: closing its stream")
                self._close(session)
                self.release(*kv_handles(report))
                session.close("the router does not keep up")

    def measure_memory(self) -> None:
        """Measure the memory of both processes, for GET /v1/cluster."""
        resident = from_wing("common.resident:resident")
        if resident is None:
            return
        front, engine = resident(), resident(self._engine.pid)
        self._memory = pb.LoadReport(
            front_private_bytes=front.private_bytes, engine_private_bytes=engine.private_bytes,
            engine_shared_bytes=engine.shared_bytes,
        )  # fmt: skip

    def heartbeat(self) -> None:
        """Show routers that this worker is alive, also during a long step. Called a few times a second."""
        if self.load.kv_blocks_total and not self.out_of_service:  # the engine has reported
            self._send(defaultdict(pb.StepReport), [])

    def _load_report(self) -> pb.LoadReport:
        report = pb.LoadReport()
        report.CopyFrom(self.load)
        report.MergeFrom(self._memory)
        if self.drain is not None:
            self.drain.tell(report)
        return report
