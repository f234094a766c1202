"""Block bookkeeping of requests: what a request owns, what caches give it, where it goes when it is swapped.

Sits between the scheduler, which decides, and `BlockPool`, which counts. Knows nothing of queues, budgets or tensors.
A request's table lists its blocks in the order of its tokens. `engine/kv_groups` has the tables of other models.
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

NO_BLOCK = BlockId(-1)  # an entry that holds none


@dataclass(slots=True)
class CacheStats:
    """Prompt tokens looked up and found, since the start."""

    queried_tokens: int = 0
    hit_tokens: int = 0


class KVManager:
    """Blocks of requests in one pool."""

    blocks_per_position = 1  # that a request takes when its last ones are full

    def __init__(self, pool: BlockPool, block_size: int, fingerprint: str) -> None:
        self.pool = pool
        self.block_size = block_size
        self.stats = CacheStats()
        self.prefixes = Prefixes(pool, block_size, fingerprint)
        self._in_flight = 0  # steps
        self._num_ended = 0
        self._used: deque[tuple[int, Collection[BlockId]]] = deque()  # until so many steps have ended, see `is_used`

    def figures(self) -> Figures:
        """See `engine.wings.Counting`."""
        return {}

    # -- counts ----------------------------------------------------------------------------------------------

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that the pool holds; None: any."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Entries of a table for `num_tokens`."""
        return -(-num_tokens // self.block_size) * self.blocks_per_position

    def num_blocks_to_admit(self, request: Request) -> int:
        """How many of the available blocks all tokens of `request` take at most; changes nothing.

        Blocks of its prefix that others use are free of charge; idle ones count as available until it takes them.
        """
        table = self.prefixes.cached_table(request, request.num_reusable_tokens)
        return self.num_blocks_for(request.num_tokens) - sum(1 for block_id in table if self.pool.refcount(block_id))

    def num_blocks_to_load(self, num_tokens: int) -> int:
        """Number of blocks in a peer's lease on the KV of `num_tokens`."""
        return self.num_blocks_for(num_tokens)

    def blocks_of(self, request: Request) -> list[BlockId]:
        """The blocks that the request has a reference on."""
        return request.block_ids

    # -- taking blocks ---------------------------------------------------------------------------------------

    def attach_cached(self, request: Request, max_tokens: int) -> int:
        """Give `request` the cached blocks of its longest known prefix, at most `max_tokens`; returns tokens."""
        assert not request.block_ids
        request.block_ids = self.prefixes.cached_table(request, max_tokens)
        self.pool.acquire(self.blocks_of(request))
        request.num_published_blocks = len(request.block_ids) // self.blocks_per_position
        return request.num_published_blocks * self.block_size

    def attach_for_load(self, request: Request, num_tokens: int) -> tuple[dict[int, BlockId], int]:
        """Give `request` all blocks for `num_tokens`: cached ones where there are any, fresh ones to be filled else.

        Returns the fresh ones by their position, and the number of tokens that are cached. The caller has checked
        that they are available.
        """
        table, first, num_blocks = request.block_ids, len(request.block_ids), self.num_blocks_for(num_tokens)
        table += self.pool.find(request.block_keys[first : num_tokens // self.block_size], NO_BLOCK)
        self.pool.acquire([block_id for block_id in table[first:] if block_id != NO_BLOCK])  # before others go
        table += [NO_BLOCK] * (num_blocks - len(table))
        missing = [position for position in range(first, num_blocks) if table[position] == NO_BLOCK]
        fresh = dict(zip(missing, self.pool.allocate(len(missing)), strict=True))
        for position, block_id in fresh.items():
            table[position] = block_id
        return fresh, (num_blocks - len(fresh)) * self.block_size

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; False when the pool is exhausted."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
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
        self._publish(request, first, last)
        request.num_published_blocks = max(last, first)

    def _publish(self, request: Request, first: int, last: int) -> None:
        """Make the blocks at positions `first` to before `last` findable."""
        for block_id, key in zip(request.block_ids[first:last], request.block_keys[first:last], strict=True):
            self.pool.publish(block_id, key)

    def release(self, request: Request, is_used: bool = False) -> None:
        """Drop all of the request's blocks and host slots. Keyed blocks stay cached. is_used: by steps in flight."""
        if is_used:
            self.give_back(self.blocks_of(request))
        else:
            self.pool.release(self.blocks_of(request))
        request.block_ids = []
        request.num_published_blocks = 0

    def release_uncomputed(self, request: Request) -> None:
        """Drop the blocks after those that hold the computed tokens of `request`."""
        num_kept = self.num_blocks_for(request.num_computed_tokens)
        self.pool.release(request.block_ids[num_kept:])
        del request.block_ids[num_kept:]

    # -- steps in flight -------------------------------------------------------------------------------------

    def launched(self, step: ScheduledStep) -> None:
        """The step is in flight from now on."""
        self._in_flight += 1

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
        wanted = set(block_ids)
        return not all(wanted.isdisjoint(blocks) for _, blocks in self._used)

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
        num_kept = self.num_blocks_for(num_tokens)
        self.give_back(table[num_kept:])
        return table[:num_kept]

    # -- host tier: here there is none, see `engine/host_tier/kv_manager.py` -----------------------------------

    def attach_from_host(self, request: Request, max_tokens: int, step: ScheduledStep) -> int:
        """Continue the prefix from the host tier: allocate blocks and plan the copies; returns tokens."""
        return 0

    def swap_out(self, request: Request, step: ScheduledStep) -> bool:
        """Move the computed KV of `request` to the host tier; False when it is to be computed again."""
        return False

    def num_blocks_to_swap_in(self, request: Request, num_tokens: int) -> int:
        """Blocks of a swapped request when it returns with room for `num_tokens`."""
        raise AssertionError("nothing has been swapped out")

    def swap_in(self, request: Request, step: ScheduledStep) -> None:
        """Bring swapped KV back into fresh blocks; the caller has checked that they are available."""
        raise AssertionError("nothing has been swapped out")

    def offload_evicted(self, step: ScheduledStep) -> None:
        """Plan to keep blocks that this step evicts in the host tier, as far as it has room."""
        self.pool.take_evicted()

    def finish_copies(self, step: ScheduledStep) -> None:
        """The runner has executed the step's copies: written slots become findable, read ones unpinned."""
