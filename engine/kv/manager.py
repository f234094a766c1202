"""Block bookkeeping of requests: the blocks that a request owns, reuses from caches, or swaps to host memory.

Stands between the scheduler, which decides, and `BlockPool`, which counts references. Knows no queues, budgets or
tensors. A request's block table lists its blocks in the order of its tokens; `engine/kv_groups` has other tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.kv.prefixes import Prefixes
from engine.request import Request
from engine.scheduled_step import ScheduledStep
from engine.wings import Figures
from kvstore.pool.block_pool import BlockPool
from kvstore.types import BlockId

NO_BLOCK = BlockId(-1)  # a table entry without a block


@dataclass(slots=True)
class CacheStats:
    """Prompt tokens that were looked up and found since the start."""

    queried_tokens: int = 0
    hit_tokens: int = 0


class KVManager:
    """Manages the blocks of requests in one pool."""

    blocks_per_position = 1  # blocks that a request takes when its last ones are full

    def __init__(self, pool: BlockPool, block_size: int, fingerprint: str) -> None:
        self.pool = pool
        self.block_size = block_size
        self.stats = CacheStats()
        self.prefixes = Prefixes(pool, block_size, fingerprint)
        self.in_flight: deque[ScheduledStep] = deque()  # launched steps, the oldest first

    def figures(self) -> Figures:
        """See `engine.wings.Counting`."""
        return {}

    # -- counts ----------------------------------------------------------------------------------------------

    @property
    def longest(self) -> int | None:
        """Number of tokens of the longest sequence that fits into the pool; None: no limit."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of table entries for `num_tokens`."""
        return -(-num_tokens // self.block_size) * self.blocks_per_position

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request has at a time until it has `num_tokens`."""
        return self.num_blocks_for(num_tokens)

    def num_blocks_to_admit(self, request: Request) -> int:
        """Return how many of the available blocks all tokens of `request` take at most. Changes nothing.

        Cached blocks that other requests use need no available block; idle cached blocks count as available.
        """
        table = self.prefixes.cached_table(request, request.num_reusable_tokens)
        return self.num_blocks_for(request.num_tokens) - sum(1 for block_id in table if self.pool.refcount(block_id))

    def num_blocks_to_load(self, num_tokens: int) -> int:
        """Return the number of blocks in a peer's lease on the KV of `num_tokens`."""
        return self.num_blocks_for(num_tokens)

    def blocks_of(self, request: Request) -> list[BlockId]:
        """Return the blocks that the request has a reference to."""
        return request.block_ids

    # -- taking blocks ---------------------------------------------------------------------------------------

    def attach_cached(self, request: Request, max_tokens: int) -> int:
        """Give `request` its longest cached prefix of at most `max_tokens`. Returns the number of cached tokens."""
        assert not request.block_ids
        request.block_ids = self.prefixes.cached_table(request, max_tokens)
        self.pool.acquire(self.blocks_of(request))
        request.num_published_blocks = len(request.block_ids) // self.blocks_per_position
        return request.num_published_blocks * self.block_size

    def attach_for_load(self, request: Request, num_tokens: int) -> tuple[dict[int, BlockId], int]:
        """Give `request` all blocks for `num_tokens`: cached ones, and fresh ones that a load has to fill.

        Returns the fresh blocks by position, and the number of cached tokens. The caller has checked that enough
        blocks are available.
        """
        table, first, num_blocks = request.block_ids, len(request.block_ids), self.num_blocks_for(num_tokens)
        table += self.pool.find(request.block_keys[first : num_tokens // self.block_size], NO_BLOCK)
        self.pool.acquire([block_id for block_id in table[first:] if block_id != NO_BLOCK])  # or they are evicted
        table += [NO_BLOCK] * (num_blocks - len(table))
        missing = [position for position in range(first, num_blocks) if table[position] == NO_BLOCK]
        fresh = dict(zip(missing, self.pool.allocate(len(missing)), strict=True))
        for position, block_id in fresh.items():
            table[position] = block_id
        return fresh, (num_blocks - len(fresh)) * self.block_size

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` tokens in total. Returns False if the pool is exhausted."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        if missing > self.pool.num_available:
            return False
        request.block_ids.extend(self.pool.allocate(missing))
        return True

    # -- publishing blocks, and giving them back -------------------------------------------------------------

    def publish(self, request: Request) -> None:
        """Publish the request's blocks that are full, computed and not published yet, so that they can be found."""
        first = request.num_published_blocks
        if request.num_computed_tokens // self.block_size <= first or not self.pool.enable_prefix_cache:
            return  # most calls end here, without reading the tokens
        last = min(request.num_computed_tokens, request.num_known_tokens) // self.block_size
        self.prefixes.extend_keys(request)
        self._publish(request, first, last)
        request.num_published_blocks = max(last, first)

    def _publish(self, request: Request, first: int, last: int) -> None:
        """Publish the blocks at positions [first, last)."""
        for block_id, key in zip(request.block_ids[first:last], request.block_keys[first:last], strict=True):
            self.pool.publish(block_id, key)

    def release(self, request: Request, is_used: bool = False) -> None:
        """Free the request's blocks and host slots. Published blocks stay cached. is_used: by steps in flight."""
        if is_used:
            self.give_back(self.blocks_of(request))
        else:
            self.pool.release(self.blocks_of(request))
        request.block_ids = []
        request.num_published_blocks = 0

    def release_uncomputed(self, request: Request) -> None:
        """Free the blocks of `request` after those of its computed tokens."""
        num_kept = self.num_blocks_for(request.num_computed_tokens)
        self.pool.release(request.block_ids[num_kept:])
        del request.block_ids[num_kept:]

    # -- steps in flight -------------------------------------------------------------------------------------

    def launched(self, step: ScheduledStep) -> None:
        """Record that the step is in flight."""
        self.in_flight.append(step)

    def is_used(self, block_ids: Collection[BlockId], step: ScheduledStep) -> bool:
        """Whether `step`, or one in flight, may still read or write some of these blocks after they were freed.

        Steps run one after the other on the device; other writers to the pool must wait for them.
        """
        wanted = set(block_ids)
        return not all(wanted.isdisjoint(blocks) for each in self.in_flight for blocks in each.freed)

    def give_back(self, block_ids: Sequence[BlockId]) -> None:
        """Free blocks that steps in flight may still use."""
        self.pool.release(block_ids)
        if self.in_flight:
            self.in_flight[-1].freed.append(block_ids)

    # -- blocks for peers ------------------------------------------------------------------------------------

    def detach(self, request: Request, num_tokens: int) -> list[BlockId]:
        """Take the blocks with the KV of the first `num_tokens` from `request`, with their references, for a lease.

        Frees its other blocks. Returns none if the request has already given up its blocks.
        """
        table, request.block_ids = request.block_ids, []
        num_kept = self.num_blocks_for(num_tokens)
        self.give_back(table[num_kept:])
        return table[:num_kept]

    # -- host tier: here there is none, see `engine/host_tier/kv_manager.py` -----------------------------------

    def attach_from_host(self, request: Request, max_tokens: int, step: ScheduledStep) -> int:
        """Continue the prefix from the host tier: allocate blocks, plan the copies. Returns the number of tokens."""
        return 0

    def swap_out(self, request: Request, step: ScheduledStep) -> bool:
        """Move the computed KV of `request` to the host tier. Returns False if it has to be computed again."""
        return False

    def num_blocks_to_swap_in(self, request: Request, num_tokens: int) -> int:
        """Return the number of blocks that a swapped request takes to return with room for `num_tokens`."""
        raise AssertionError("nothing has been swapped out")

    def swap_in(self, request: Request, step: ScheduledStep) -> None:
        """Bring swapped KV back into fresh blocks. The caller has checked that they are available."""
        raise AssertionError("nothing has been swapped out")

    def offload_evicted(self, step: ScheduledStep) -> None:
        """Plan copies of the blocks that this step evicts to the host tier, while it has room."""
        self.pool.take_evicted()

    def finish_copies(self, step: ScheduledStep) -> None:
        """Record that the step's copies are done: publish the written slots, unpin the read ones."""
