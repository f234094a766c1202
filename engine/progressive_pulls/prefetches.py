"""Prefetches: KV of prompts that peers are still computing, on its way into this engine's prefix cache.

A prefetch takes only blocks that nobody needs, is owed to nobody, and ends as ordinary cached blocks. Pure, like the
scheduler, between whose decisions it reserves blocks; docs/decisions/prefill-decode-hand-off.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.scheduled_step import KvLoad
from kvstore.pool.block_pool import BlockPool
from kvstore.types import BlockKey

MAX_PREFETCHES = 4  # under way at once; what comes beside them is pulled with the rest of its prompt


@dataclass(frozen=True, slots=True)
class _Part:
    """Full blocks of a prompt, in `source`."""

    source: object
    block_keys: Sequence[BlockKey]


class Prefetches:
    """Parts of prompts that wait for `reserve`, and those whose blocks are being filled."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._queued: list[_Part] = []
        self._filling: set[BlockKey] = set()
        self._fetched: OrderedDict[BlockKey, None] = OrderedDict()  # not counted by a request yet, oldest first
        self._num_open = 0

    def add(self, source: object, block_keys: Sequence[BlockKey]) -> None:
        """Queue full blocks of a prompt for the next step."""
        self._queued.append(_Part(source, block_keys))

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    def has_any_of(self, block_keys: Sequence[BlockKey]) -> bool:
        """Whether a block with one of these keys is queued or being filled."""
        if not (self._queued or self._filling):
            return False
        coming = self._filling.union(*(part.block_keys for part in self._queued))
        return not coming.isdisjoint(block_keys)

    def reserve(self, num_spare_blocks: int) -> list[KvLoad]:
        """Turn what is queued into loads, as far as `num_spare_blocks` go."""
        loads: list[KvLoad] = []
        for part in self._queued:
            positions = self._positions(part, num_spare_blocks)
            num_spare_blocks -= len(positions)
            keys = [part.block_keys[position] for position in positions]
            block_ids, num_tokens = self._pool.allocate(len(keys)), len(keys) * self._block_size
            loads.append(KvLoad(None, part.source, positions, block_ids, num_tokens, keys))
            # The next part, or the rest of the prompt, is about as long. It shall find free blocks, and wait neither
            # for evictions nor for copies of evicted blocks to the host tier.
            self._pool.release(self._pool.allocate(min(len(positions), self._pool.num_available)))
            self._filling.update(keys)
            self._num_open += bool(positions)
        self._queued.clear()
        return loads

    def finish(self, load: KvLoad, ok: bool) -> None:
        """Give the load's blocks back: filled ones to the cache."""
        if ok:
            for block_id, key in zip(load.block_ids, load.block_keys, strict=True):
                self._pool.publish(block_id, key)
                self._fetched[key] = None
            while len(self._fetched) > self._pool.num_blocks:
                self._fetched.popitem(last=False)
        self._pool.release(load.block_ids)
        self._filling.difference_update(load.block_keys)
        self._num_open -= 1

    def take_fetched(self, block_keys: Sequence[BlockKey]) -> int:
        """Number of these blocks that were fetched and are still cached; each is counted once."""
        if not self._fetched:
            return 0
        fetched = [key for key in block_keys if key in self._fetched]
        for key in fetched:
            del self._fetched[key]
        return sum(map(self._pool.contains, fetched))

    def _positions(self, part: _Part, num_spare_blocks: int) -> list[int]:
        """Positions of the blocks to fetch: all that are not here, if there is room."""
        if not self._pool.enable_prefix_cache or self._num_open >= MAX_PREFETCHES:
            return []
        keys = enumerate(part.block_keys)
        positions = [index for index, key in keys if key not in self._filling and not self._pool.contains(key)]
        return positions if len(positions) <= num_spare_blocks else []
