"""Block bookkeeping of requests: what a request owns, what caches give it, where it goes when it is swapped.

Sits between the scheduler, which decides, and `BlockPool`, which counts. Knows nothing of queues, budgets or tensors.
Tables are those of `engine/kv/block_groups.py`: what no later query reads goes back when a request takes its next
blocks (`grow`), so that nothing is done per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.kv.block_groups import NO_BLOCK, BlockGroups, group_table
from engine.kv.prefixes import Prefixes
from engine.request import Request
from engine.scheduled_step import ScheduledStep
from engine.wings import Figures
from kvstore.pool.block_pool import BlockPool
from kvstore.types import BlockId


@dataclass(slots=True)
class CacheStats:
    """Prompt tokens looked up and found, since the start."""

    queried_tokens: int = 0
    hit_tokens: int = 0


class KVManager:
    """Blocks of requests in one pool."""

    def __init__(self, pool: BlockPool, groups: BlockGroups, fingerprint: str) -> None:
        self.pool = pool
        self.groups = groups
        self.block_size = groups.block_size
        self.blocks_per_position = groups.num_groups  # that a request takes when its last ones are full
        self.stats = CacheStats()
        self.prefixes = Prefixes(pool, groups, fingerprint)
        self._in_flight = 0  # steps
        self._num_ended = 0
        self._used: deque[tuple[int, Collection[BlockId]]] = deque()  # until so many steps have ended, see `is_used`

    def figures(self) -> Figures:
        """See `engine.wings.Counting`."""
        return {}

    # -- counts ----------------------------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        """Entries of a table for `num_tokens`."""
        return -(-num_tokens // self.block_size) * self.blocks_per_position

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

    def num_blocks_to_load(self, num_tokens: int) -> int:
        """Number of blocks in a peer's lease on the KV of `num_tokens`."""
        return self.groups.num_live(num_tokens, num_tokens)

    # -- taking blocks ---------------------------------------------------------------------------------------

    def attach_cached(self, request: Request, max_tokens: int) -> int:
        """Give `request` the cached blocks of its longest known prefix, at most `max_tokens`; returns tokens."""
        assert not request.block_ids
        request.block_ids = self.prefixes.cached_table(request, max_tokens)
        self.pool.acquire(held(request.block_ids))
        request.num_published_blocks = len(request.block_ids) // self.blocks_per_position
        return request.num_published_blocks * self.block_size

    def attach_for_load(self, request: Request, num_tokens: int) -> tuple[dict[int, BlockId], int]:
        """Give `request` all blocks for `num_tokens`: cached ones where there are any, fresh ones to be filled else.

        A peer's lease holds the blocks that are live after `num_tokens`, in the table's order. Returns the fresh
        ones by their position there, and the number of tokens that are cached. The caller has checked that they are
        available.
        """
        table, count = request.block_ids, self.blocks_per_position
        first, last = len(table) // count, min(num_tokens // self.block_size, len(request.block_keys))
        table += [NO_BLOCK] * (self.num_blocks_for(num_tokens) - len(table))
        for group, window in enumerate(self.groups.windows):
            start = max(self.groups.first_live(window, num_tokens), first)
            found = self.pool.find(self.prefixes.keys(request, group, start, last), NO_BLOCK)
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
        """Make room for `num_tokens` tokens in all; False when the pool is exhausted.

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
            self.give_back(held(request.block_ids))
        else:
            self.pool.release(held(request.block_ids))
        request.block_ids = []
        request.num_published_blocks = 0

    def release_uncomputed(self, request: Request) -> None:
        """Drop the blocks after those that hold the computed tokens of `request`."""
        num_kept = self.num_blocks_for(request.num_computed_tokens)
        self.pool.release(held(request.block_ids[num_kept:]))
        del request.block_ids[num_kept:]

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

    def detach(self, request: Request, num_tokens: int) -> list[BlockId]:
        """Take the blocks with the KV of the first `num_tokens` from `request`, with their references, for a lease.

        Others are released. None, if the request has given its blocks up before.
        """
        table, request.block_ids = request.block_ids, []
        num_entries = self.num_blocks_for(num_tokens)
        self.give_back(held(table[num_entries:]))
        self.give_back(self.groups.take_passed(table, num_tokens, has_gaps=True))
        return held(table[:num_entries])

    # -- host tier: here there is none, see `engine/host_tier/kv_manager.py` -----------------------------------

    def attach_from_host(self, request: Request, max_tokens: int, step: ScheduledStep) -> int:
        """Continue the prefix from the host tier: allocate blocks and plan the copies; returns tokens."""
        return 0

    def swap_out(self, request: Request, step: ScheduledStep) -> bool:
        """Move the computed KV of `request` to the host tier; False when it is to be computed again."""
        return False

    def swap_in(self, request: Request, step: ScheduledStep) -> None:
        """Bring swapped KV back into fresh blocks; the caller has checked that they are available."""
        raise AssertionError("nothing has been swapped out")

    def offload_evicted(self, step: ScheduledStep) -> None:
        """Plan to keep blocks that this step evicts in the host tier, as far as it has room."""
        self.pool.take_evicted()

    def finish_copies(self, step: ScheduledStep) -> None:
        """The runner has executed the step's copies: written slots become findable, read ones unpinned."""


def held(table: list[BlockId]) -> list[BlockId]:
    """The table without entries that hold nothing: itself, if there are none."""
    return [block_id for block_id in table if block_id != NO_BLOCK] if NO_BLOCK in table else table
