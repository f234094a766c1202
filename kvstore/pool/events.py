"""Which keys a worker can serve, as a numbered log: stored, removed, snapshot.

Numbers are consecutive within one epoch, starting at 1. A snapshot has the number of the last event that it
contains, so the next event after it is that number + 1; a reader that sees a gap asks for a new snapshot.
The log keeps the current key set, not history: a new reader starts with a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.errors import TransferError
from kvstore.pool.block_hash import KEY_BYTES
from kvstore.types import BlockKey
from protos import types_pb2

MAX_EVENT_KEYS = 1 << 20  # of one event; 32 MB, half of what one message may hold

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

    @property
    def num_keys(self) -> int:
        return len(self._keys)

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
    keys = types_pb2.BlockKeys(keys=event.keys)
    if event.kind == "stored":
        return types_pb2.KvEvent(sequence=event.sequence, stored=keys)
    if event.kind == "removed":
        return types_pb2.KvEvent(sequence=event.sequence, removed=keys)
    return types_pb2.KvEvent(sequence=event.sequence, snapshot=keys)


def from_proto(message: types_pb2.KvEvent) -> CacheEvent:
    """Raises TransferError for an event that no worker of this version sends."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise TransferError("a KV event of an unknown kind")
    keys = getattr(message, kind).keys
    if len(keys) > MAX_EVENT_KEYS or any(len(key) != KEY_BYTES for key in keys):
        raise TransferError("a KV event with malformed keys")
    return CacheEvent(message.sequence, kind, tuple(map(BlockKey, keys)))
