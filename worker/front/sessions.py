"""Sessions of routers, with the reports queued for their Attach streams; the numbered events of cached blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.types import BlockKey
from protos import types_pb2 as pb

MAX_WAITING_REPORTS = 4096  # a router that lags this far is gone or broken; its stream ends


@dataclass(eq=False)
class Session:
    """One router's stream: its queue of reports, in which None ends the stream."""

    reports: asyncio.Queue[pb.StepReport | None] = field(default_factory=asyncio.Queue)
    last_report_time: float = 0.0
    closed_reason: str = ""
    num_drain_changes: int = 0  # the last that the router has acknowledged

    def send(self, report: pb.StepReport) -> bool:
        """Queue a report; return False if the router does not keep up."""
        if self.reports.qsize() >= MAX_WAITING_REPORTS:
            return False
        self.reports.put_nowait(report)
        return True

    def unsent_handles(self) -> list[pb.KvHandle]:
        """Empty the queue and return its KV handles, which the router will not receive."""
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
    handles = [delta.kv_handle for delta in report.deltas if delta.HasField("kv_handle")]
    return handles + [offer.kv_handle for offer in report.kv_offers]


class EventLog:
    """The keys of this worker's cached blocks, for routers' indexes; updated with `BlockPool.take_events()`.

    Numbers are consecutive within one epoch, starting at 1. A snapshot has the number of the last event that it
    includes, so the next event is that number + 1; a reader that sees a gap asks for a new snapshot. The log keeps
    the current set of keys, not its history: a new reader starts with a snapshot.
    """

    def __init__(self) -> None:
        self.sequence = 0  # number of the last event
        self._keys: dict[BlockKey, None] = {}  # oldest first

    def append(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> list[pb.KvEvent]:
        """Apply a net change; return its events, at most two, removed keys first."""
        for key in removed:
            self._keys.pop(key, None)
        self._keys.update(dict.fromkeys(stored))
        changes = (("removed", removed), ("stored", stored))
        return [self._numbered(kind, keys) for kind, keys in changes if keys]

    def snapshot(self) -> pb.KvEvent:
        """Return all keys as of the last event."""
        return pb.KvEvent(sequence=self.sequence, snapshot=pb.BlockKeys(keys=self._keys))

    def _numbered(self, kind: str, keys: Sequence[BlockKey]) -> pb.KvEvent:
        self.sequence += 1
        return pb.KvEvent(sequence=self.sequence, **{kind: pb.BlockKeys(keys=keys)})
