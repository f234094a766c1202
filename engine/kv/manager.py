"""Block bookkeeping of requests: what a request owns, what caches give it, where it goes when it is swapped.

Sits between the scheduler, which decides, and `BlockPool` and `HostTier`, which count. Knows nothing of queues,
budgets or tensors; copies are only written into the step, for the runner to execute. Tables are those of
`engine/kv/block_groups.py`: what no later query reads goes back when a request takes its next blocks (`grow`), so
that nothing is done per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.kv.block_groups import NO_BLOCK, BlockGroups, group_table
from engine.kv.prefixes import Prefixes
from engine.request import Request
from engine.scheduled_step import ScheduledStep
from kvstore.pool.block_pool import BlockPool
from kvstore.pool.host_tier import HostTier
from kvstore.types import BlockId


@dataclass(slots=True)
class CacheStats:
    """Prompt tokens looked up and found, and the host tier's part, since the start."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    host_stored_blocks: int = 0


class KVManager:
    """Blocks of requests in one pool, with an optional host tier behind it."""

    def __init__(
        self, pool: BlockPool, groups: BlockGroups, fingerprint: str, host_tier: HostTier | None = None
    ) -> None:
        self.pool = pool
        self.groups = groups
        self.block_size = groups.block_size
        self.blocks_per_position = groups.num_groups  # that a request takes when its last ones are full
        self._windows = [(group, window) for group, window in enumerate(groups.windows) if window]
        self.host_tier = host_tier
        self.stats = CacheStats()
        self.prefixes = Prefixes(pool, groups, fingerprint)
        self._in_flight = 0  # steps
        self._num_ended = 0
        self._used: deque[tuple[int, Collection[BlockId]]] = deque()  # until so many steps have ended, see `is_used`

    # -- counts ----------------------------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        """Entries of a table for `num_tokens`."""
        return -(-num_tokens // self.block_size) * self.blocks_per_position

    def num_tokens_in(self, num_blocks: int) -> int:
        """Tokens for which a table of `num_blocks` entries has room."""
        return num_blocks // self.blocks_per_position * self.block_size

    def longest_sequence(self, max_model_len: int) -> int:
        """The longest sequence that the pool holds, at most `max_model_len`."""
        longest = self.groups.longest(self.pool.num_blocks)
        return max_model_len if longest is None else min(max_model_len, longest)

    def held_blocks(self, request: Request) -> list[BlockId]:
        """The blocks on which `request` has references."""
        return _held(request.block_ids)

    def num_blocks_to_admit(self, request: Request) -> int:
        """How many of the available blocks all tokens of `request` take at most; changes nothing.

        Blocks of its prefix that others use are free of charge; idle ones count as available until it takes them.
        Those of a window are charged: they go back, and the request gets its own.
        """
        windows, count = self.groups.windows, self.blocks_per_position
        table = self.prefixes.cached_table(request, request.num_reusable_tokens) if 0 in windows else []
        kept = [table[group::count] for group, window in enumerate(windows) if not window]
        num_shared = sum(1 for block_ids in kept for block_id in block_ids if self.pool.refcount(block_id))
        return self.groups.most_live(request.num_tokens) - num_shared

    def num_blocks_to_resume(self, request: Request, num_tokens: int) -> int:
        """How many of the available blocks swapped KV and the tokens up to `num_tokens` take."""
        return self.groups.num_live(request.num_computed_tokens, num_tokens)

    def num_blocks_to_load(self, num_tokens: int) -> int:
        """Number of blocks in a peer's lease on the KV of `num_tokens`."""
        return self.groups.num_live(num_tokens, num_tokens)

    # -- taking blocks ---------------------------------------------------------------------------------------

    def attach_cached(self, request: Request, max_tokens: int) -> int:
        """Give `request` the cached blocks of its longest known prefix, at most `max_tokens`; returns tokens."""
        assert not request.block_ids
        request.block_ids = self.prefixes.cached_table(request, max_tokens)
        self.pool.acquire(_held(request.block_ids))
        request.num_published_blocks = len(request.block_ids) // self.blocks_per_position
        return request.num_published_blocks * self.block_size

    def cached_blocks(self, request: Request) -> list[BlockId]:
        """The blocks of the longest known prefix of `request`, idle ones included; changes nothing."""
        return _held(self.prefixes.cached_table(request, request.num_reusable_tokens))

    def attach_for_load(self, request: Request, num_tokens: int) -> tuple[dict[int, BlockId], int]:
        """Give `request` all blocks for `num_tokens`: cached ones where there are any, fresh ones to be filled else.

        A peer's lease holds the blocks that are live behind `num_tokens`, in the table's order. Returns the fresh
        ones by their position there, and the number of tokens that are cached. The caller has checked that they are
        available.
        """
        table, count = request.block_ids, self.blocks_per_position
        first, last = len(table) // count, min(num_tokens // self.block_size, len(request.block_keys))
        table += [NO_BLOCK] * (self.num_blocks_for(num_tokens) - len(table))
        for group, window in enumerate(self.groups.windows):
            start = max(self.groups.first_live(window, num_tokens), first)
            found = self.pool.find(self.prefixes.keys(request, group, start, last), NO_BLOCK)
            self.pool.acquire(_held(found))  # before others are evicted
            table[start * count + group : last * count : count] = found
        live = self.groups.live_entries(num_tokens, num_tokens)
        missing = [position for position, entry in enumerate(live) if table[entry] == NO_BLOCK]
        fresh = dict(zip(missing, self.pool.allocate(len(missing)), strict=True))
        for position, block_id in fresh.items():
            table[live[position]] = block_id
        num_positions = len(table) // count
        return fresh, num_positions * (len(live) - len(fresh)) // max(len(live), 1) * self.block_size

    def attach_from_host(self, request: Request, max_tokens: int, step: ScheduledStep) -> int:
        """Continue the prefix from the host tier: allocate blocks and plan the copies; returns tokens."""
        if self.host_tier is None or not self.pool.enable_prefix_cache:
            return 0
        first = len(request.block_ids) // self.blocks_per_position
        last = min(max_tokens // self.block_size, len(request.block_keys))
        if first >= last:
            return 0
        last, slots = self.prefixes.find_on_host(self.host_tier, request, first, last)
        blocks = self.pool.allocate(len(slots))
        step.copies_in.extend(zip(slots.values(), blocks, strict=True))
        request.block_ids += [NO_BLOCK] * (last * self.blocks_per_position - len(request.block_ids))
        for entry, block_id in zip(slots, blocks, strict=True):
            request.block_ids[entry] = block_id
        num_tokens = (last - first) * self.block_size
        self.stats.host_hit_tokens += num_tokens
        return num_tokens

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; False when the pool is exhausted.

        Blocks that no query from the first uncomputed token on reads go back first, if new ones are needed.
        """
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        self._release_passed(request)
        if missing > self.pool.num_available:
            return False
        request.block_ids.extend(self.pool.allocate(missing))
        return True

    # -- publishing blocks, and giving them back -------------------------------------------------------------

    def publish(self, request: Request) -> None:
        """Make the request's blocks findable that are full, computed and not published yet."""
        first = request.num_published_blocks
        if request.num_computed_tokens // self.block_size <= first or not self.pool.enable_prefix_cache:
            return  # which a step does for most requests, without a look at their tokens
        last = min(request.num_computed_tokens, request.num_known_tokens) // self.block_size
        self.prefixes.extend_keys(request)
        publish, count = self.pool.publish, self.blocks_per_position
        for group in range(count):
            blocks = group_table(request.block_ids, group, count, first, last)
            for block_id, key in zip(blocks, self.prefixes.keys(request, group, first, last), strict=True):
                if block_id != NO_BLOCK:  # left behind already
                    publish(block_id, key)
        request.num_published_blocks = max(last, first)

    def release(self, request: Request, is_used: bool = False) -> None:
        """Drop all of the request's blocks and host slots. Keyed blocks stay cached. is_used: by steps in flight."""
        if is_used:
            self.give_back(_held(request.block_ids))
        else:
            self.pool.release(_held(request.block_ids))
        request.block_ids = []
        request.num_published_blocks = 0
        if request.host_slots:
            assert self.host_tier is not None
            self.host_tier.unpin(request.host_slots)
            request.host_slots = []

    def release_uncomputed(self, request: Request) -> None:
        """Drop the blocks behind those that hold the computed tokens of `request`."""
        num_kept = self.num_blocks_for(request.num_computed_tokens)
        self.pool.release(_held(request.block_ids[num_kept:]))
        del request.block_ids[num_kept:]

    def _release_passed(self, request: Request) -> None:
        """Give back the blocks that no query from the first uncomputed token on reads."""
        block_ids, count = request.block_ids, self.blocks_per_position
        for group, window in self._windows:
            passed = self.groups.first_live(window, request.num_computed_tokens)
            entry = (passed - 1) * count + group
            while entry >= 0 and block_ids[entry] != NO_BLOCK:
                self.give_back([block_ids[entry]])
                block_ids[entry] = NO_BLOCK
                entry -= count

    # -- steps in flight -------------------------------------------------------------------------------------

    def launched(self, step: ScheduledStep) -> None:
        """The step is in flight from now on, with its copies."""
        self._in_flight += 1
        if step.copies_out or step.copies_in:
            copied = [block_id for block_id, _ in step.copies_out] + [block_id for _, block_id in step.copies_in]
            self._used.append((self._num_ended + self._in_flight, copied))

    def ended(self) -> None:
        """The oldest step in flight has ended."""
        self._in_flight -= 1
        self._num_ended += 1
        while self._used and self._used[0][0] <= self._num_ended:
            self._used.popleft()

    def is_used(self, block_ids: Collection[BlockId], step: ScheduledStep) -> bool:
        """Whether `step`, or one in flight, may still read or write blocks that are free otherwise.

        Steps follow each other on the device; what else writes to the pool must wait for them.
        """
        used = [blocks for _, blocks in self._used]
        used.append([block_id for block_id, _ in step.copies_out])
        return not all(map(set(block_ids).isdisjoint, used))

    def give_back(self, block_ids: Sequence[BlockId]) -> None:
        """Release blocks that steps in flight may use."""
        self.pool.release(block_ids)
        if self._in_flight and block_ids:
            self._used.append((self._num_ended + self._in_flight, block_ids))

    # -- blocks for peers ------------------------------------------------------------------------------------

    @property
    def leases_in_order(self) -> bool:
        """Whether the lease on a prompt begins with the blocks of the leases on its parts."""
        return self.groups.is_plain

    def part_blocks(self, request: Request, first: int, last: int) -> list[BlockId]:
        """Blocks at positions `first` to before `last` that are worth a lease while the prompt is being computed.

        Those of the one group without a window: others may go before the prompt is computed.
        """
        if self.groups.windows.count(0) != 1:
            return []
        return group_table(request.block_ids, 0, self.blocks_per_position, first, last)

    def detach(self, request: Request, num_tokens: int) -> list[BlockId]:
        """Take the blocks with the KV of the first `num_tokens` from `request`, with their references, for a lease.

        Others are released. None, if the request has given its blocks up before.
        """
        table, request.block_ids = request.block_ids, []
        num_entries, count = self.num_blocks_for(num_tokens), self.blocks_per_position
        self.give_back(_held(table[num_entries:]))
        for group, window in self._windows:
            passed = slice(group, self.groups.first_live(window, num_tokens) * count, count)
            self.give_back(_held(table[passed]))
            table[passed] = [NO_BLOCK] * len(table[passed])
        return _held(table[:num_entries])

    # -- host tier -------------------------------------------------------------------------------------------

    def swap_out(self, request: Request, step: ScheduledStep) -> bool:
        """Move the computed KV of `request` to the host tier; False when there is no tier or no room."""
        live = self.groups.live_entries(request.num_computed_tokens, request.num_computed_tokens)
        if self.host_tier is None or not live:
            return False
        slots = self.host_tier.reserve([None] * len(live))
        if slots is None:
            return False
        step.copies_out.extend((request.block_ids[entry], slot) for entry, slot in zip(live, slots, strict=True))
        self.release(request, is_used=True)
        request.host_slots = slots
        return True

    def swap_in(self, request: Request, step: ScheduledStep) -> None:
        """Bring swapped KV back into fresh blocks; the caller has checked that they are available."""
        num_tokens = request.num_computed_tokens
        request.block_ids = [NO_BLOCK] * self.num_blocks_for(num_tokens)
        blocks = self.pool.allocate(len(request.host_slots))
        for entry, block_id in zip(self.groups.live_entries(num_tokens, num_tokens), blocks, strict=True):
            request.block_ids[entry] = block_id
        step.copies_in.extend(zip(request.host_slots, blocks, strict=True))
        request.host_slots = []

    def offload_evicted(self, step: ScheduledStep) -> None:
        """Plan to keep blocks that this step evicts in the host tier, as far as it has room."""
        evicted = self.pool.take_evicted()
        if self.host_tier is None or not evicted:
            return
        missing = set(self.host_tier.missing([key for _, key in evicted]))
        kept = [entry for entry in evicted if entry[1] in missing]
        while kept:
            slots = self.host_tier.reserve([key for _, key in kept])
            if slots is not None:
                step.copies_out.extend((block, slot) for (block, _), slot in zip(kept, slots, strict=True))
                step.offload_slots.extend(slots)
                self.stats.host_stored_blocks += len(slots)
                return
            kept = kept[: len(kept) // 2]  # the tier is nearly all pinned: keep what fits

    def finish_copies(self, step: ScheduledStep) -> None:
        """The runner has executed the step's copies: written slots become findable, read ones unpinned."""
        if self.host_tier is None:
            return
        if step.offload_slots:
            self.host_tier.commit(step.offload_slots)
            self.host_tier.unpin(step.offload_slots)
        if step.copies_in:
            self.host_tier.unpin([slot for slot, _ in step.copies_in])


def _held(table: list[BlockId]) -> list[BlockId]:
    """The table without entries that hold nothing: itself, if there are none."""
    return [block_id for block_id in table if block_id != NO_BLOCK] if NO_BLOCK in table else table
