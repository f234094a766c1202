"""Block bookkeeping of requests whose tables are those of `engine/kv_groups/block_groups.py`."""

from __future__ import annotations

from engine.kv.manager import NO_BLOCK, KVManager
from engine.kv.prefixes import Prefixes
from engine.kv_groups.block_groups import BlockGroups, group_table
from engine.request import Request
from kvstore.pool.block_hash import group_key
from kvstore.pool.block_pool import BlockPool
from kvstore.types import BlockId, BlockKey


class GroupedKVManager(KVManager):
    """See KVManager."""

    def __init__(self, pool: BlockPool, groups: BlockGroups, fingerprint: str) -> None:
        super().__init__(pool, groups.block_size, fingerprint)
        self.groups = groups
        self.blocks_per_position = groups.num_groups
        self.prefixes = GroupedPrefixes(pool, groups, fingerprint)

    @property
    def longest(self) -> int | None:
        return self.groups.longest(self.pool.num_blocks)

    def most_blocks(self, num_tokens: int) -> int:
        return self.groups.most_live(num_tokens)

    def num_blocks_to_admit(self, request: Request) -> int:
        """See KVManager. Blocks of a window are charged: they go back, and the request gets its own."""
        windows, count = self.groups.windows, self.blocks_per_position
        table = self.prefixes.cached_table(request, request.num_reusable_tokens) if 0 in windows else []
        kept = [table[group::count] for group, window in enumerate(windows) if not window]
        num_shared = sum(1 for block_ids in kept for block_id in block_ids if self.pool.refcount(block_id))
        return self.most_blocks(request.num_tokens) - num_shared

    def num_blocks_to_load(self, num_tokens: int) -> int:
        return self.groups.num_live(num_tokens, num_tokens)

    def blocks_of(self, request: Request) -> list[BlockId]:
        return held(request.block_ids)

    def attach_for_load(self, request: Request, num_tokens: int) -> tuple[dict[int, BlockId], int]:
        """See KVManager. A peer's lease holds the blocks that are live after `num_tokens`, in the table's order."""
        table, count = request.block_ids, self.blocks_per_position
        first, last = len(table) // count, min(num_tokens // self.block_size, len(request.block_keys))
        table += [NO_BLOCK] * (self.num_blocks_for(num_tokens) - len(table))
        for group, window in enumerate(self.groups.windows):
            start = max(self.groups.first_live(window, num_tokens), first)
            found = self.pool.find(keys_of(request, group, start, last), NO_BLOCK)
            self.pool.acquire(held(found))  # before others are evicted
            table[start * count + group : last * count : count] = found
        live = self.groups.live_entries(num_tokens, num_tokens)
        missing = [position for position, entry in enumerate(live) if table[entry] == NO_BLOCK]
        fresh = dict(zip(missing, self.pool.allocate(len(missing)), strict=True))
        for position, block_id in fresh.items():
            table[live[position]] = block_id
        num_positions = len(table) // count
        return fresh, num_positions * (len(live) - len(fresh)) // max(len(live), 1) * self.block_size

    def grow(self, request: Request, num_tokens: int) -> bool:
        """See KVManager.

        Blocks that no query from the first uncomputed token on reads go back first, if new ones are needed.
        """
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        self.give_back(self.groups.take_passed(request.block_ids, request.num_computed_tokens))
        if missing > self.pool.num_available:
            return False
        request.block_ids.extend(self.pool.allocate(missing))
        return True

    def _publish(self, request: Request, first: int, last: int) -> None:
        publish, count = self.pool.publish, self.blocks_per_position
        for group in range(count):
            blocks = group_table(request.block_ids, group, count, first, last)
            for block_id, key in zip(blocks, keys_of(request, group, first, last), strict=True):
                if block_id != NO_BLOCK:  # left behind already
                    publish(block_id, key)

    def release_uncomputed(self, request: Request) -> None:
        num_kept = self.num_blocks_for(request.num_computed_tokens)
        self.pool.release(held(request.block_ids[num_kept:]))
        del request.block_ids[num_kept:]

    def detach(self, request: Request, num_tokens: int) -> list[BlockId]:
        table, request.block_ids = request.block_ids, []
        num_entries = self.num_blocks_for(num_tokens)
        self.give_back(held(table[num_entries:]))
        self.give_back(self.groups.take_passed(table, num_tokens, has_gaps=True))
        return held(table[:num_entries])


class GroupedPrefixes(Prefixes):
    """See Prefixes. A prefix is as long as all groups can continue it."""

    def __init__(self, pool: BlockPool, groups: BlockGroups, fingerprint: str) -> None:
        super().__init__(pool, groups.block_size, fingerprint)
        self._groups = groups

    def _look_up(self, keys: list[BlockKey]) -> list[BlockId]:
        return self._groups.cached_table(self._pool, keys)


def keys_of(request: Request, group: int, first: int, last: int) -> list[BlockKey]:
    """Keys of a group's full blocks at positions `first` to before `last`."""
    keys = request.block_keys[first:last]
    return [group_key(key, group) for key in keys] if group else keys


def held(table: list[BlockId]) -> list[BlockId]:
    """The table without entries that hold nothing: itself, if there are none."""
    return [block_id for block_id in table if block_id != NO_BLOCK] if NO_BLOCK in table else table
