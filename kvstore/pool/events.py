"""KV events: the keys that a worker can serve, as a numbered log of stored, removed and snapshot.

Numbers are consecutive within one epoch, starting at 1. A snapshot has the number of the last event that it
contains, so the next event after it is that number + 1; a reader that sees a gap asks for a new snapshot.
The log keeps the current key set, not history: a new reader starts with a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.types import BlockKey
from protos import types_pb2

EventKind = Literal["stored", "removed", "snapshot"]


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One entry of the log."""

    sequence: int
    kind: EventKind
    keys: tuple[BlockKey, ...]


class EventLog:
    """Numbers changes of a key set. Fed with `BlockPool.take_events()`, sent to routers."""

    def __init__(self) -> None:
        self.sequence = 0  # of the last event
        self._keys: dict[BlockKey, None] = {}  # oldest first

    def append(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> list[CacheEvent]:
        """Apply one net change; up to two events, removed first."""
        events: list[CacheEvent] = []
        for key in removed:
            self._keys.pop(key, None)
        self._keys.update(dict.fromkeys(stored))
        if removed:
            events.append(self._numbered("removed", removed))
        if stored:
            events.append(self._numbered("stored", stored))
        return events

    def snapshot(self) -> CacheEvent:
        """The whole set as of the last event."""
        return CacheEvent(self.sequence, "snapshot", tuple(self._keys))

    def _numbered(self, kind: EventKind, keys: Sequence[BlockKey]) -> CacheEvent:
        self.sequence += 1
        return CacheEvent(self.sequence, kind, tuple(keys))


def to_proto(event: CacheEvent) -> types_pb2.KvEvent:
    return types_pb2.KvEvent(sequence=event.sequence, **{event.kind: types_pb2.BlockKeys(keys=event.keys)})
