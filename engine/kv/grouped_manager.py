"""Block bookkeeping for models with KV groups: layers with a window give back what no later query reads.

What `KVManager` does for a plain list of blocks, here for tables with one block per group at each position. Blocks go
back when a request takes its next ones (`grow`), so that nothing is done per token. See docs/decisions/0230.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.kv.block_groups import NO_BLOCK, BlockGroups, group_table
from engine.kv.manager import KVManager
from engine.request import Request
from engine.scheduled_step import ScheduledStep
from kvstore.pool.block_hash import group_key
from kvstore.pool.block_pool import BlockPool
from kvstore.tier.host_tier import HostTier
from kvstore.types import BlockId


class GroupedKVManager(KVManager):
    """A `KVManager` whose requests have a table of `BlockGroups`."""

    leases_in_order = False

    def __init__(
        self,
        pool: BlockPool,
        groups: BlockGroups,
        fingerprint: str,
        host_tier: HostTier | None = None,
        enable_prefix_cache: bool = True,
    ) -> None:
        super().__init__(pool, groups.block_size, fingerprint, host_tier, enable_prefix_cache)
        self.groups = groups
        self.blocks_per_position = groups.num_groups

    # -- counts ----------------------------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        """Entries of a table for `num_tokens`."""
        return self.groups.num_positions(num_tokens) * self.groups.num_groups

    def num_tokens_in(self, num_blocks: int) -> int:
        return num_blocks // self.groups.num_groups * self.block_size

    def longest_sequence(self, max_model_len: int) -> int:
        longest = self.groups.longest(self.pool.num_blocks)
        return max_model_len if longest is None else min(max_model_len, longest)

    def held_blocks(self, request: Request) -> list[BlockId]:
        return [block_id for block_id in request.block_ids if block_id != NO_BLOCK]

    def num_blocks_to_admit(self, request: Request) -> int:
        """See KVManager. Shared blocks of a window are charged: they go back, and the request gets its own."""
        most, windows = self.groups.most_live(request.num_tokens), self.groups.windows
        if 0 not in windows or not self.enable_prefix_cache:
            return most
        table = self._cached_table(request, request.num_reusable_tokens).items()
        kept = [block_id for entry, block_id in table if not windows[entry % len(windows)]]
        return most - sum(1 for block_id in kept if self.pool.refcount(block_id))

    def num_blocks_to_resume(self, request: Request, num_tokens: int) -> int:
        return self.groups.num_live(request.num_computed_tokens, num_tokens)

    def num_blocks_to_load(self, num_tokens: int) -> int:
        return self.groups.num_live(num_tokens, num_tokens)

    # -- taking blocks ---------------------------------------------------------------------------------------

    def attach_cached(self, request: Request, max_tokens: int) -> int:
        if not self.enable_prefix_cache:
            return 0
        assert not request.block_ids
        table = self._cached_table(request, max_tokens)
        if not table:
            return 0
        num_positions = max(table) // self.groups.num_groups + 1
        self.pool.acquire(table.values())
        request.block_ids = [NO_BLOCK] * (num_positions * self.groups.num_groups)
        for entry, block_id in table.items():
            request.block_ids[entry] = block_id
        request.num_published_blocks = num_positions
        return num_positions * self.block_size

    def cached_blocks(self, request: Request) -> list[BlockId]:
        if not self.enable_prefix_cache:
            return []
        return list(self._cached_table(request, request.num_reusable_tokens).values())

    def attach_for_load(self, request: Request, num_tokens: int) -> tuple[dict[int, BlockId], int]:
        """See KVManager. A lease holds the blocks that are live behind `num_tokens`, in the table's order."""
        groups, num_attached = self.groups, len(request.block_ids)
        request.block_ids += [NO_BLOCK] * (self.num_blocks_for(num_tokens) - num_attached)
        live = groups.live_entries(num_tokens, num_tokens)
        missing: dict[int, int] = {}  # entry -> position in the lease
        for position, entry in enumerate(live):
            if entry < num_attached:
                continue
            found = self._cached_entry(request, entry)
            if found is None:
                missing[entry] = position
            else:
                self.pool.acquire([found])  # before others are evicted
                request.block_ids[entry] = found
        fresh: dict[int, BlockId] = {}
        for (entry, position), block_id in zip(missing.items(), self.pool.allocate(len(missing)), strict=True):
            request.block_ids[entry] = fresh[position] = block_id
        num_kept = num_tokens * (len(live) - len(fresh)) // len(live)
        return fresh, num_kept // self.block_size * self.block_size

    def attach_from_host(self, request: Request, max_tokens: int, step: ScheduledStep) -> int:
        """Continue the prefix from the host tier, where it has all that queries behind it read of what it adds."""
        if self.host_tier is None or not self.enable_prefix_cache:
            return 0
        groups, block_size = self.groups, self.block_size
        first = len(request.block_ids) // groups.num_groups
        last = min(max_tokens // block_size, len(request.block_keys))
        keys = {
            (position, group): group_key(request.block_keys[position], group)
            for position in range(first, last)
            for group in range(groups.num_groups)
        }
        missing = set(self.host_tier.missing(list(keys.values()))) if keys else set()

        def has(position: int, group: int) -> bool:
            if position < first:
                return request.block_ids[position * groups.num_groups + group] != NO_BLOCK
            return keys[position, group] not in missing

        count = self._longest_hit(last, has)
        if count <= first:
            return 0
        entries = groups.live_entries(count * block_size, count * block_size, first)
        slots = self.host_tier.lookup([keys[divmod(entry, groups.num_groups)] for entry in entries])
        if len(slots) < len(entries):  # others have evicted some since
            self.host_tier.unpin(slots)
            return 0
        table = [NO_BLOCK] * ((count - first) * groups.num_groups)
        blocks = self.pool.allocate(len(entries))
        for entry, block_id in zip(entries, blocks, strict=True):
            table[entry - first * groups.num_groups] = block_id
        step.copies_in.extend(zip(slots, blocks, strict=True))
        request.block_ids += table
        self.stats.host_hit_tokens += (count - first) * block_size
        return (count - first) * block_size

    def grow(self, request: Request, num_tokens: int) -> bool:
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        self._release_passed(request)
        if missing > self.pool.num_available:
            return False
        request.block_ids.extend(self.pool.allocate(missing))
        return True

    # -- giving blocks back ----------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        request.block_ids = self.held_blocks(request)
        super().release(request)

    def release_uncomputed(self, request: Request) -> None:
        num_kept = self.num_blocks_for(request.num_computed_tokens)
        self.pool.release([block_id for block_id in request.block_ids[num_kept:] if block_id != NO_BLOCK])
        del request.block_ids[num_kept:]

    def detach(self, request: Request, num_tokens: int) -> list[BlockId]:
        table, request.block_ids = request.block_ids, []
        live = self.groups.live_entries(num_tokens, num_tokens)
        leased = [table[entry] for entry in live]
        for entry in live:
            table[entry] = NO_BLOCK
        self.pool.release([block_id for block_id in table if block_id != NO_BLOCK])
        return leased

    def part_blocks(self, request: Request, first: int, last: int) -> list[BlockId]:
        """Return blocks of the one group without a window: others may go before the prompt is computed."""
        if self.groups.windows.count(0) != 1:
            return []
        return group_table(request.block_ids, 0, self.groups.num_groups, first, last)

    def publish(self, request: Request) -> None:
        num_full = min(request.num_computed_tokens, request.num_known_tokens) // self.block_size
        if not self.enable_prefix_cache or num_full <= request.num_published_blocks:
            return
        self.extend_keys(request)
        count = self.groups.num_groups
        for position in range(request.num_published_blocks, num_full):
            key = request.block_keys[position]
            for group, block_id in enumerate(request.block_ids[position * count : (position + 1) * count]):
                if block_id != NO_BLOCK:  # left behind already
                    self.pool.publish(block_id, group_key(key, group))
        request.num_published_blocks = num_full

    # -- host tier -------------------------------------------------------------------------------------------

    def swap_out(self, request: Request, step: ScheduledStep) -> bool:
        live = self.groups.live_entries(request.num_computed_tokens, request.num_computed_tokens)
        if self.host_tier is None or not live:
            return False
        slots = self.host_tier.reserve([None] * len(live))
        if slots is None:
            return False
        step.copies_out.extend((request.block_ids[entry], slot) for entry, slot in zip(live, slots, strict=True))
        self.release(request)
        request.host_slots = slots
        return True

    def swap_in(self, request: Request, step: ScheduledStep) -> None:
        num_tokens = request.num_computed_tokens
        request.block_ids = [NO_BLOCK] * self.num_blocks_for(num_tokens)
        blocks = self.pool.allocate(len(request.host_slots))
        for entry, block_id in zip(self.groups.live_entries(num_tokens, num_tokens), blocks, strict=True):
            request.block_ids[entry] = block_id
        step.copies_in.extend(zip(request.host_slots, blocks, strict=True))
        request.host_slots = []

    # -- inside ----------------------------------------------------------------------------------------------

    def _release_passed(self, request: Request) -> None:
        """Give back the blocks that no query from the first uncomputed token on reads."""
        block_ids, count = request.block_ids, self.groups.num_groups
        for group, window in enumerate(self.groups.windows):
            passed = self.groups.first_live(window, request.num_computed_tokens)
            entry = (passed - 1) * count + group
            while entry >= 0 and block_ids[entry] != NO_BLOCK:
                self.pool.release([block_ids[entry]])
                block_ids[entry] = NO_BLOCK
                entry -= count

    def _cached_table(self, request: Request, max_tokens: int) -> dict[int, BlockId]:
        """Cached blocks of the longest prefix of at most `max_tokens` that all groups can continue, by entry."""
        self.extend_keys(request)
        groups = self.groups
        last = min(max_tokens // self.block_size, len(request.block_keys))

        def has(position: int, group: int) -> bool:
            return self.pool.contains(group_key(request.block_keys[position], group))

        num_tokens = self._longest_hit(last, has) * self.block_size
        table: dict[int, BlockId] = {}
        for entry in groups.live_entries(num_tokens, num_tokens):
            found = self._cached_entry(request, entry)
            assert found is not None
            table[entry] = found
        return table

    def _cached_entry(self, request: Request, entry: int) -> BlockId | None:
        position, group = divmod(entry, self.groups.num_groups)
        if position >= len(request.block_keys):  # the last block is partial
            return None
        return self._cached_block(group_key(request.block_keys[position], group))

    def _longest_hit(self, num_positions: int, has: Callable[[int, int], bool]) -> int:
        """Positions of the longest prefix, at most `num_positions`, of which all groups have what is live behind it.

        has: whether a position has a block of a group.
        """
        groups = self.groups
        runs = [0] * groups.num_groups  # how many positions in a row each group has, up to the last one looked at
        longest = 0
        for position in range(num_positions):
            for group, window in enumerate(groups.windows):
                if has(position, group):
                    runs[group] += 1
                elif window:
                    runs[group] = 0
                else:
                    return longest
            count = position + 1
            num_tokens = count * self.block_size
            if all(
                run >= count - groups.first_live(window, num_tokens)
                for run, window in zip(runs, groups.windows, strict=True)
            ):
                longest = count
        return longest
