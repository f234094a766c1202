"""Host memory behind a pool, as the scheduler uses it, synchronously and between steps; whose it is, others know."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

from kvstore.types import BlockKey, HostSlot


class HostTier(Protocol):
    """Slots of `block_bytes` each. Everything that returns slots pins them until `unpin`."""

    @property
    def num_slots(self) -> int: ...

    @property
    def buffer(self) -> mmap.mmap:
        """`num_slots * block_bytes` writable bytes; slot i begins at i * block_bytes."""
        ...

    def missing(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The subset of `keys` that is not findable here, in one round trip."""
        ...

    def lookup(self, keys: Sequence[BlockKey]) -> list[HostSlot]:
        """Slots of the longest prefix of `keys` that is present, pinned."""
        ...

    def reserve(self, keys: Sequence[BlockKey | None]) -> list[HostSlot] | None:
        """Take one pinned slot per key, not yet findable; None (and no change) when there is no room.

        None as a key: the slot never becomes findable (a swapped partial block).
        """
        ...

    def commit(self, slots: Sequence[HostSlot]) -> None:
        """Mark reserved slots as written; those with a key become findable."""
        ...

    def unpin(self, slots: Sequence[HostSlot]) -> None:
        """Give up one pin of each, in sequence order: findable slots stay as cache, others become free."""
        ...

    def close(self) -> None: ...

    def check_integrity(self) -> None: ...
