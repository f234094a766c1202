"""Ownership of KV blocks: free, used (reference counted) or cached (no reference, findable by key).

Knows ids and keys, but no tensors, tokens or clocks; the scheduler calls it between steps, from one thread.
Prefix caching is part of it, because a cached block *is* a free block whose content may be reused: allocation takes
free blocks first and then evicts the least recently used cached ones.

Every operation costs O(blocks touched). Misuse that only a bug can cause (releasing a free block) raises
AssertionError, also under `python -O`: otherwise one sequence could get the KV of another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from common.errors import OverloadedError
from kvstore.pool.block_hash import GROUP_MARK
from kvstore.types import BlockId, BlockKey


class PoolExhausted(OverloadedError):
    """Fewer blocks are free or evictable than requested; nothing was changed."""


class BlockPool:
    """The states of `num_blocks` blocks. With `enable_prefix_cache=False` no block is ever findable."""

    def __init__(self, num_blocks: int, enable_prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_cache = enable_prefix_cache
        self._free: list[BlockId] = [BlockId(i) for i in reversed(range(num_blocks))]
        self._refcount: list[int] = [0] * num_blocks
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self._key_of: dict[BlockId, BlockKey] = {}
        self._block_of: dict[BlockKey, BlockId] = {}
        self._evicted: dict[BlockId, BlockKey] = {}
        self._changes: dict[BlockKey, bool] = {}  # key -> stored (True) or removed: net changes since take_events

    # --- counts ------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can return."""
        return len(self._free) + len(self._cached)

    def refcount(self, block_id: BlockId) -> int:
        return self._refcount[block_id]

    def key_of(self, block_id: BlockId) -> BlockKey | None:
        return self._key_of.get(block_id)

    def contains(self, key: BlockKey) -> bool:
        return key in self._block_of

    # --- life of a block ---------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Return the blocks of the longest prefix of `keys` that is present. Takes no references, see `acquire`."""
        block_ids: list[BlockId] = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def find(self, keys: Iterable[BlockKey], absent: BlockId) -> list[BlockId]:
        """Return the block of each key, or `absent`. Changes nothing."""
        return [self._block_of.get(key, absent) for key in keys]

    def acquire(self, block_ids: Iterable[BlockId]) -> None:
        """Take one reference on each block; cached blocks become used."""
        refcount, cached = self._refcount, self._cached
        for block_id in block_ids:
            if refcount[block_id] == 0:
                if block_id not in cached:
                    raise AssertionError(f"acquire of free block {block_id}")
                del cached[block_id]
            refcount[block_id] += 1

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Return blocks with one reference each and no key. Raises PoolExhausted."""
        if num_blocks > self.num_available:
            raise PoolExhausted(f"{num_blocks} KV blocks wanted, {self.num_available} of {self.num_blocks} left")
        block_ids: list[BlockId] = []
        for _ in range(num_blocks):
            block_id = self._free.pop() if self._free else self._evict()
            self._refcount[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def publish(self, block_id: BlockId, key: BlockKey) -> bool:
        """Make a used, completely written block findable. Returns False if another block has the key already."""
        if self._refcount[block_id] <= 0:
            raise AssertionError(f"publish of unused block {block_id}")
        if self._key_of.get(block_id, key) != key:
            raise AssertionError(f"block {block_id} has another key already")
        if not self.enable_prefix_cache:
            return False
        if self._block_of.setdefault(key, block_id) != block_id:
            return False
        if block_id not in self._key_of:
            self._key_of[block_id] = key
            self._record(key, stored=True)
        return True

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference on each block of a sequence, given in sequence order.

        The last block is released first, so that the tail of a sequence is evicted before its head: blocks without
        the blocks before them are of no use.
        """
        for block_id in reversed(block_ids):
            if self._refcount[block_id] <= 0:
                raise AssertionError(f"release of unused block {block_id}")
            self._refcount[block_id] -= 1
            if self._refcount[block_id] == 0:
                if block_id in self._key_of:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    # --- changes since the last call ---------------------------------------------------------------------

    def take_evicted(self) -> list[tuple[BlockId, BlockKey]]:
        """Return the blocks evicted since the last call. Their content is intact until the next step writes."""
        evicted = list(self._evicted.items())
        self._evicted.clear()
        return evicted

    def announce(self, key: BlockKey, is_there: bool) -> None:
        """Record an event for something other than a block: an adapter, which the root of its block keys names."""
        self._record(key, stored=is_there)

    def take_events(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return the keys (stored, removed); a key that was stored and removed again, or vice versa, is in neither.

        Only keys of the first KV group, which determines the length of a cached prefix.
        """
        stored = [key for key, is_stored in self._changes.items() if is_stored]
        removed = [key for key, is_stored in self._changes.items() if not is_stored]
        self._changes.clear()
        return stored, removed

    def _evict(self) -> BlockId:
        """Take the least recently used block out of the cache. The caller must put it into another state."""
        block_id, _none = self._cached.popitem(last=False)
        key = self._evicted[block_id] = self._key_of.pop(block_id)
        del self._block_of[key]
        self._record(key, stored=False)
        return block_id

    def _record(self, key: BlockKey, stored: bool) -> None:
        if key.startswith(GROUP_MARK):
            return
        if key in self._changes:  # the opposite change, because stored and removed alternate
            del self._changes[key]
        else:
            self._changes[key] = stored

    # --- invariant ---------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError, with all errors, unless each block is in one state and the maps are inverse."""
        errors: list[str] = []
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            errors.append("a block is twice in the free list")
        for index in range(self.num_blocks):
            block_id = BlockId(index)
            states = [block_id in free, block_id in cached, self._refcount[block_id] > 0]
            if sum(states) != 1:
                errors.append(f"block {block_id}: (free, cached, used) = {states}")
            if self._refcount[block_id] < 0:
                errors.append(f"block {block_id}: refcount {self._refcount[block_id]}")
            if block_id in free and block_id in self._key_of:
                errors.append(f"free block {block_id} has a key")
            if block_id in cached and block_id not in self._key_of:
                errors.append(f"cached block {block_id} has no key")
        if {key: block_id for block_id, key in self._key_of.items()} != self._block_of:
            errors.append("block -> key and key -> block disagree")
        for block_id in (free | cached | set(self._key_of)) - set(range(self.num_blocks)):
            errors.append(f"block {block_id} does not exist")
        if errors:
            raise AssertionError("; ".join(errors))
