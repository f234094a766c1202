"""One router's Attach stream: which requests it has open here, and the reports that wait to be sent to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from engine.request import RequestId
from protos import types_pb2 as pb

MAX_WAITING_REPORTS = 4096  # a router that is so far behind is gone or broken; its stream ends


@dataclass(eq=False)
class Session:
    """Reports go out in order; None in the queue ends the stream."""

    reports: asyncio.Queue[pb.StepReport | None] = field(default_factory=asyncio.Queue)
    names: dict[str, RequestId] = field(default_factory=dict)  # the router's request id -> the engine's
    last_report_time: float = 0.0
    closed_reason: str = ""
    num_drain_changes: int = 0  # of which the router knows

    def send(self, report: pb.StepReport) -> bool:
        """Queue a report; False when the router does not keep up."""
        if self.reports.qsize() >= MAX_WAITING_REPORTS:
            return False
        self.reports.put_nowait(report)
        return True

    def unsent_handles(self) -> list[pb.KvHandle]:
        """Drain the queue and return the KV handles in it, which the router will not receive."""
        handles: list[pb.KvHandle] = []
        while not self.reports.empty():
            report = self.reports.get_nowait()
            if report is not None:
                handles += kv_handles(report)
        return handles

    def close(self, reason: str) -> None:
        self.closed_reason = reason
        self.reports.put_nowait(None)


def kv_handles(report: pb.StepReport) -> list[pb.KvHandle]:
    given = [delta.kv_handle for delta in report.deltas if delta.HasField("kv_handle")]
    return given + [offer.kv_handle for offer in report.kv_offers]
