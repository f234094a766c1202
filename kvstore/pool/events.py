"""KV events: the keys that a worker can serve, as a numbered log of stored, removed and snapshot.

Numbers are consecutive within one epoch, starting at 1. A snapshot has the number of the last event that it
contains, so the next event after it is that number + 1; a reader that sees a gap asks for a new snapshot.
The log keeps the current key set, not history: a new reader starts with a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.types import BlockKey
from protos import types_pb2 as pb


class EventLog:
    """Numbers changes of a key set. Fed with `BlockPool.take_events()`, sent to routers."""

    def __init__(self) -> None:
        self.sequence = 0  # of the last event
        self._keys: dict[BlockKey, None] = {}  # oldest first

    def append(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> list[pb.KvEvent]:
        """Apply one net change; up to two events, removed first."""
        for key in removed:
            self._keys.pop(key, None)
        self._keys.update(dict.fromkeys(stored))
        changes = (("removed", removed), ("stored", stored))
        return [self._numbered(kind, keys) for kind, keys in changes if keys]

    def snapshot(self) -> pb.KvEvent:
        """The whole set as of the last event."""
        return pb.KvEvent(sequence=self.sequence, snapshot=pb.BlockKeys(keys=self._keys))

    def _numbered(self, kind: str, keys: Sequence[BlockKey]) -> pb.KvEvent:
        self.sequence += 1
        return pb.KvEvent(sequence=self.sequence, **{kind: pb.BlockKeys(keys=keys)})
