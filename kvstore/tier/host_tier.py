"""The host-memory tier: evicted and swapped KV blocks go there and come back.

A slot is free, pinned (being copied, or part of a swapped sequence) or cached (found by key, LRU). These are the
states of a `BlockPool`, which therefore does the allocation; only the names differ. The engine copies bytes through
`buffer`. `LocalHostTier` belongs to this process, `agent_client.AgentHostTier` to the node agent.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

from common.errors import ConfigError
from kvstore.pool.block_pool import BlockPool
from kvstore.types import BlockId, BlockKey, HostSlot

OnChange = Callable[[Sequence[BlockKey], Sequence[BlockKey]], object]


class HostTier(Protocol):
    """The tier as the scheduler uses it, synchronously and between steps: slots of `block_bytes` each.

    Every method that returns slots pins them until `unpin`."""

    @property
    def num_slots(self) -> int: ...

    @property
    def buffer(self) -> mmap.mmap:
        """`num_slots * block_bytes` writable bytes; slot i begins at i * block_bytes."""
        ...

    def missing(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return the `keys` that cannot be found here, in one round trip."""
        ...

    def lookup(self, keys: Sequence[BlockKey]) -> list[HostSlot]:
        """Pin and return the slots of the longest prefix of `keys` that is present."""
        ...

    def reserve(self, keys: Sequence[BlockKey | None]) -> list[HostSlot] | None:
        """Take one pinned slot per key, not findable yet; None (and no change) if there is no room.

        None as a key: the slot never becomes findable (a swapped partial block).
        """
        ...

    def commit(self, slots: Sequence[HostSlot]) -> None:
        """Mark reserved slots as written; those with a key become findable."""
        ...

    def unpin(self, slots: Sequence[HostSlot]) -> None:
        """Release one pin of each slot, in sequence order: findable slots stay cached, others become free."""
        ...

    def close(self) -> None: ...

    def check_integrity(self) -> None: ...


class HostTierAllocator:
    """Pure state of `num_slots` slots."""

    def __init__(self, num_slots: int, on_change: OnChange = lambda _stored, _removed: None) -> None:
        """on_change: gets the keys that have become findable, and the keys that no longer are."""
        self._pool = BlockPool(num_slots)
        self._on_change = on_change
        self._pending: dict[HostSlot, BlockKey] = {}  # reserved and not committed

    @property
    def num_slots(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    @property
    def num_pinned(self) -> int:
        return self._pool.num_used

    def missing(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return [key for key in keys if not self._pool.contains(key)]

    def lookup(self, keys: Sequence[BlockKey]) -> list[HostSlot]:
        found = self._pool.lookup(keys)
        self._pool.acquire(found)
        return [HostSlot(block_id) for block_id in found]

    def reserve(self, keys: Sequence[BlockKey | None]) -> list[HostSlot] | None:
        if len(keys) > self._pool.num_available:
            return None
        slots = [HostSlot(block_id) for block_id in self._pool.allocate(len(keys))]
        self._pool.take_evicted()  # there is no tier below this one
        self._on_change(*self._pool.take_events())
        self._pending.update((slot, key) for slot, key in zip(slots, keys, strict=True) if key is not None)
        return slots

    def commit(self, slots: Sequence[HostSlot]) -> None:
        for slot in slots:
            key = self._pending.pop(slot, None)
            if key is not None:
                self._pool.publish(BlockId(slot), key)
        self._on_change(*self._pool.take_events())

    def unpin(self, slots: Sequence[HostSlot]) -> None:
        self._pool.release([BlockId(slot) for slot in slots])
        for slot in slots:
            if self._pool.refcount(BlockId(slot)) == 0:
                self._pending.pop(slot, None)

    def check_integrity(self) -> None:
        """Raise AssertionError listing all inconsistencies."""
        self._pool.check_integrity()
        for slot in self._pending:
            if self._pool.refcount(BlockId(slot)) == 0 or self._pool.key_of(BlockId(slot)) is not None:
                raise AssertionError(f"slot {slot} waits for a commit but is not reserved")


class LocalHostTier(HostTierAllocator):
    """A host tier of this process, in anonymous memory. Raises ConfigError without the memory."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        num_bytes = num_slots * block_bytes
        try:
            self.buffer = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE))
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"no memory for a host tier of {num_bytes / 2**30:.1f} GB: lower --host-tier-gb"
            ) from error
        super().__init__(num_slots)

    def close(self) -> None:
        """Unmap the memory, unless views exist; then it is freed with the last view."""
        with contextlib.suppress(BufferError):
            self.buffer.close()
