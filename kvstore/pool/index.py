"""The router's prefix index: which worker holds which block, and how reliable that is.

A mirror of the workers' caches, fed by their numbered events. Per worker it is

    EXACT      every event was seen since a snapshot (or since the worker's first event)
    DEGRADED   a number was skipped, or nothing came yet: still used, but the caller should get a snapshot
    PARTIAL    every event was seen, but the worker has more keys than are kept here: the oldest are forgotten

A wrong index costs time, never correctness: workers look up their own cache again. Pure, standard library
only; knows keys and worker ids, nothing of tokens, load or the network.
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
    sequence: int | None = None  # last event that was applied; None: never heard of an event
    keys: dict[BlockKey, None] = field(default_factory=dict)  # oldest first


class PrefixIndex:
    """Block key -> set of workers, as a bit mask, so that a match of 1,000 keys is 1,000 dictionary reads.

    At most `max_keys_per_worker` keys per worker: one that reports more turns PARTIAL.
    """

    def __init__(self, max_keys_per_worker: int = 1 << 20) -> None:
        self._max_keys = max_keys_per_worker
        self._workers: dict[WorkerId, _Worker] = {}
        self._by_bit: dict[int, WorkerId] = {}
        self._mask: dict[BlockKey, int] = {}

    @property
    def num_keys(self) -> int:
        """Distinct keys known anywhere."""
        return len(self._mask)

    def num_worker_keys(self, worker: WorkerId) -> int:
        entry = self._workers.get(worker)
        return len(entry.keys) if entry else 0

    def state(self, worker: WorkerId) -> IndexState:
        """State of a worker's entries; DEGRADED also for an unknown worker."""
        entry = self._workers.get(worker)
        return entry.state if entry else IndexState.DEGRADED

    def matches(self, keys: Sequence[BlockKey]) -> dict[WorkerId, int]:
        """Number of leading blocks of `keys` that each worker holds; workers without the first are absent."""
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
        """Apply one event; one seen before is ignored. False after a gap, until a snapshot comes."""
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
        """Replace all that is known of `worker`; events go on at `sequence` + 1."""
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

    # --- inner -------------------------------------------------------------------------------------------

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
