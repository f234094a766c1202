"""The router's prefix index: which worker has which block cached, and how reliable that information is.

The index mirrors the workers' caches from their numbered events. For each worker it is

    EXACT      all events since a snapshot (or since the worker's first event) were applied
    DEGRADED   an event is missing, or none has come yet: still used, but the caller should get a snapshot
    PARTIAL    all events were applied, but the worker has more keys than the index keeps: the oldest are dropped

A wrong index costs time, never correctness: workers look up their own cache again. Pure, standard library
only; knows keys and worker ids, but not tokens, load or the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstore.types import BlockKey, WorkerId


class IndexState(Enum):
    EXACT = "exact"
    DEGRADED = "degraded"
    PARTIAL = "partial"


@dataclass(slots=True)
class _Worker:
    bit: int  # this worker's bit in the masks
    state: IndexState = IndexState.DEGRADED
    sequence: int | None = None  # number of the last event; None: no event yet
    keys: dict[BlockKey, None] = field(default_factory=dict)  # oldest first


class PrefixIndex:
    """Maps block keys to sets of workers, as bit masks: to match 1,000 keys takes 1,000 dictionary lookups.

    A worker that reports more than `max_keys_per_worker` keys becomes PARTIAL.
    """

    def __init__(self, max_keys_per_worker: int = 1 << 20) -> None:
        self._max_keys = max_keys_per_worker
        self._workers: dict[WorkerId, _Worker] = {}
        self._by_bit: dict[int, WorkerId] = {}
        self._mask: dict[BlockKey, int] = {}

    @property
    def num_keys(self) -> int:
        """Number of distinct keys of all workers."""
        return len(self._mask)

    def num_worker_keys(self, worker: WorkerId) -> int:
        entry = self._workers.get(worker)
        return len(entry.keys) if entry else 0

    def state(self, worker: WorkerId) -> IndexState:
        """Return the state of a worker's entries; DEGRADED for an unknown worker."""
        entry = self._workers.get(worker)
        return entry.state if entry else IndexState.DEGRADED

    def matches(self, keys: Sequence[BlockKey]) -> dict[WorkerId, int]:
        """Return the number of leading `keys` that each worker has; workers without the first are left out."""
        result: dict[WorkerId, int] = {}
        masks = self._mask
        alive = masks.get(keys[0], 0) if keys else 0
        if not alive:
            return result
        for count, key in enumerate(keys):
            still = alive & masks.get(key, 0)
            if still != alive:
                self._settle(alive & ~still, count, result)
                alive = still
                if not alive:
                    return result
        self._settle(alive, len(keys), result)
        return result

    def apply(
        self, worker: WorkerId, sequence: int, stored: Iterable[BlockKey] = (), removed: Iterable[BlockKey] = ()
    ) -> bool:
        """Apply one event unless it was applied before. Returns False after a gap, until a snapshot comes."""
        entry = self._entry(worker)
        if entry.sequence is None:
            entry.state = IndexState.EXACT if sequence == 1 else IndexState.DEGRADED
        elif sequence <= entry.sequence:
            return entry.state is not IndexState.DEGRADED
        elif sequence != entry.sequence + 1:
            entry.state = IndexState.DEGRADED
        entry.sequence = sequence
        self._remove(entry, removed)
        self._add(entry, stored)
        return entry.state is not IndexState.DEGRADED

    def snapshot(self, worker: WorkerId, sequence: int, keys: Sequence[BlockKey]) -> None:
        """Replace all keys of `worker`; the next event is number `sequence` + 1."""
        entry = self._entry(worker)
        self._remove(entry, list(entry.keys))
        entry.sequence = sequence
        entry.state = IndexState.EXACT
        self._add(entry, keys)

    def remove_worker(self, worker: WorkerId) -> None:
        entry = self._workers.pop(worker, None)
        if entry is not None:
            self._remove(entry, list(entry.keys))
            del self._by_bit[entry.bit]

    # --- internal ----------------------------------------------------------------------------------------

    def _entry(self, worker: WorkerId) -> _Worker:
        entry = self._workers.get(worker)
        if entry is None:
            bit = 1
            while bit in self._by_bit:
                bit <<= 1
            entry = self._workers[worker] = _Worker(bit)
            self._by_bit[bit] = worker
        return entry

    def _settle(self, gone: int, count: int, result: dict[WorkerId, int]) -> None:
        while gone:
            bit = gone & -gone
            result[self._by_bit[bit]] = count
            gone ^= bit

    def _add(self, entry: _Worker, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            entry.keys[key] = None
            self._mask[key] = self._mask.get(key, 0) | entry.bit
        excess = len(entry.keys) - self._max_keys
        if excess > 0:
            if entry.state is IndexState.EXACT:
                entry.state = IndexState.PARTIAL
            self._remove(entry, list(entry.keys)[:excess])

    def _remove(self, entry: _Worker, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            if key not in entry.keys:
                continue
            del entry.keys[key]
            rest = self._mask[key] & ~entry.bit
            if rest:
                self._mask[key] = rest
            else:
                del self._mask[key]
