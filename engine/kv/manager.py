"""Block bookkeeping of requests: what a request owns, what caches give it, where it goes when it is swapped.

Sits between the scheduler, which decides, and `BlockPool` and `HostTier`, which count. Knows nothing of queues,
budgets or tensors; copies are only written into the step, for the runner to execute.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.token_ids import pack_ids
from engine.request import Request
from engine.scheduled_step import ScheduledStep
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.pool.block_pool import BlockPool
from kvstore.tier.host_tier import HostTier
from kvstore.types import BlockId, BlockKey


@dataclass(slots=True)
class CacheStats:
    """Prompt tokens looked up and found, and the host tier's part, since the start."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    host_stored_blocks: int = 0


class KVManager:
    """Blocks of requests in one pool, with an optional host tier behind it."""

    blocks_per_position = 1
    """Blocks that a request takes when its last ones are full."""
    leases_in_order = True
    """Whether the lease on a prompt begins with the blocks of the leases on its parts."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        fingerprint: str,
        host_tier: HostTier | None = None,
        enable_prefix_cache: bool = True,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.host_tier = host_tier
        self.enable_prefix_cache = enable_prefix_cache
        self.stats = CacheStats()
        self._fingerprint = fingerprint
        self._roots: dict[tuple[str, str], BlockKey] = {}  # by adapter and salt

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_tokens_in(self, num_blocks: int) -> int:
        """Tokens for which a request has room in `num_blocks` blocks of its own."""
        return num_blocks * self.block_size

    def longest_sequence(self, max_model_len: int) -> int:
        """The longest sequence that the pool holds, at most `max_model_len`."""
        return min(max_model_len, self.pool.num_blocks * self.block_size)

    def held_blocks(self, request: Request) -> list[BlockId]:
        """The blocks on which `request` has references."""
        return request.block_ids

    # -- taking blocks ---------------------------------------------------------------------------------------

    def attach_cached(self, request: Request, max_tokens: int) -> int:
        """Give `request` the cached blocks of its longest known prefix, at most `max_tokens`; returns tokens."""
        if not self.enable_prefix_cache:
            return 0
        assert not request.block_ids
        self.extend_keys(request)
        keys = request.block_keys[: max_tokens // self.block_size]
        found = self.pool.lookup(keys)
        self.pool.acquire(found)
        request.block_ids.extend(found)
        request.num_published_blocks = len(found)
        return len(found) * self.block_size

    def num_blocks_to_load(self, num_tokens: int) -> int:
        """Number of blocks in a peer's lease on the KV of `num_tokens`."""
        return self.num_blocks_for(num_tokens)

    def attach_for_load(self, request: Request, num_tokens: int) -> tuple[dict[int, BlockId], int]:
        """Give `request` all blocks for `num_tokens`: cached ones where there are any, fresh ones to be filled else.

        Returns the fresh ones by their position in the peer's lease, and the number of tokens that are cached. The
        caller has checked that they are available.
        """
        first, num_full = len(request.block_ids), num_tokens // self.block_size
        found = [self._cached_block(key) for key in request.block_keys[first:num_full]]
        found += [None] * (self.num_blocks_for(num_tokens) - first - len(found))
        self.pool.acquire(block_id for block_id in found if block_id is not None)  # before others are evicted
        positions = [position for position, block_id in enumerate(found, first) if block_id is None]
        fresh = dict(zip(positions, self.pool.allocate(len(positions)), strict=True))
        request.block_ids += [fresh[at] if block_id is None else block_id for at, block_id in enumerate(found, first)]
        return fresh, (len(request.block_ids) - len(fresh)) * self.block_size

    def _cached_block(self, key: BlockKey) -> BlockId | None:
        return next(iter(self.pool.lookup([key])), None) if self.enable_prefix_cache else None

    def cached_blocks(self, request: Request) -> list[BlockId]:
        """The blocks of the longest known prefix of `request`, idle ones included; changes nothing."""
        if not self.enable_prefix_cache:
            return []
        self.extend_keys(request)
        return self.pool.lookup(request.block_keys[: request.num_reusable_tokens // self.block_size])

    def num_blocks_to_admit(self, request: Request) -> int:
        """How many of the available blocks all tokens of `request` take; changes nothing.

        Blocks of its prefix that others use are free of charge; idle ones count as available until it takes them.
        """
        num_shared = sum(1 for block_id in self.cached_blocks(request) if self.pool.refcount(block_id))
        return self.num_blocks_for(request.num_tokens) - num_shared

    def num_blocks_to_resume(self, request: Request, num_tokens: int) -> int:
        """How many of the available blocks swapped KV and the tokens up to `num_tokens` take."""
        return self.num_blocks_for(num_tokens)

    def attach_from_host(self, request: Request, max_tokens: int, step: ScheduledStep) -> int:
        """Continue the prefix from the host tier: allocate blocks and plan the copies; returns tokens."""
        if self.host_tier is None or not self.enable_prefix_cache:
            return 0
        first = len(request.block_ids)
        keys = request.block_keys[first : max_tokens // self.block_size]
        slots = self.host_tier.lookup(keys) if keys else []
        if not slots:
            return 0
        blocks = self.pool.allocate(len(slots))
        step.copies_in.extend(zip(slots, blocks, strict=True))
        request.block_ids.extend(blocks)
        self.stats.host_hit_tokens += len(slots) * self.block_size
        return len(slots) * self.block_size

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; False, and nothing changed, when the pool is exhausted."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        if missing > self.pool.num_available:
            return False
        request.block_ids.extend(self.pool.allocate(missing))
        return True

    # -- giving blocks back ----------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Drop all of the request's blocks and host slots. Keyed blocks stay cached."""
        if request.block_ids:
            self.pool.release(request.block_ids)
            request.block_ids = []
        request.num_published_blocks = 0
        if request.host_slots:
            assert self.host_tier is not None
            self.host_tier.unpin(request.host_slots)
            request.host_slots = []

    def release_uncomputed(self, request: Request) -> None:
        """Drop the blocks behind those that hold the computed tokens of `request`."""
        num_kept = self.num_blocks_for(request.num_computed_tokens)
        self.pool.release(request.block_ids[num_kept:])
        del request.block_ids[num_kept:]

    def detach(self, request: Request, num_tokens: int) -> list[BlockId]:
        """Take the blocks with the KV of the first `num_tokens` from `request`, with their references, for a lease.

        Others are released.
        """
        block_ids, request.block_ids = request.block_ids, []
        count = self.num_blocks_for(num_tokens)
        self.pool.release(block_ids[count:])
        return block_ids[:count]

    def part_blocks(self, request: Request, first: int, last: int) -> list[BlockId]:
        """Blocks at positions `first` to before `last` that are worth a lease while the prompt is being computed."""
        return request.block_ids[first:last]

    def publish(self, request: Request) -> None:
        """Make the request's blocks findable that are full, computed and not published yet."""
        num_full = min(request.num_computed_tokens, request.num_known_tokens) // self.block_size
        if not self.enable_prefix_cache or num_full <= request.num_published_blocks:
            return
        self.extend_keys(request)
        for index in range(request.num_published_blocks, num_full):
            self.pool.publish(request.block_ids[index], request.block_keys[index])
        request.num_published_blocks = num_full

    def extend_keys(self, request: Request) -> None:
        """Compute the keys of all full blocks of known tokens."""
        keys, size = request.block_keys, self.block_size
        num_full = request.num_known_tokens // size
        if len(keys) >= num_full:
            return
        parent = keys[-1] if keys else self._root(request.adapter, request.cache_salt)
        keys += block_keys(parent, pack_ids(request.token_ids(len(keys) * size, num_full * size)), size)

    # -- host tier -------------------------------------------------------------------------------------------

    def swap_out(self, request: Request, step: ScheduledStep) -> bool:
        """Move the computed KV of `request` to the host tier; False when there is no tier or no room."""
        num_blocks = self.num_blocks_for(request.num_computed_tokens)
        if self.host_tier is None or num_blocks == 0:
            return False
        slots = self.host_tier.reserve([None] * num_blocks)
        if slots is None:
            return False
        step.copies_out.extend(zip(request.block_ids[:num_blocks], slots, strict=True))
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_published_blocks = 0
        request.host_slots = slots
        return True

    def swap_in(self, request: Request, step: ScheduledStep) -> None:
        """Bring swapped KV back into fresh blocks; the caller has checked that they are available."""
        blocks = self.pool.allocate(len(request.host_slots))
        step.copies_in.extend(zip(request.host_slots, blocks, strict=True))
        request.block_ids = blocks
        request.host_slots = []

    def offload_evicted(self, step: ScheduledStep) -> None:
        """Plan to keep blocks that this step evicts in the host tier, as far as it has room."""
        evicted = self.pool.take_evicted()
        if self.host_tier is None:
            return
        if not evicted:
            return
        missing = set(self.host_tier.missing([key for _, key in evicted]))
        kept: list[tuple[BlockId, BlockKey]] = [entry for entry in evicted if entry[1] in missing]
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

    def _root(self, adapter: str, salt: str) -> BlockKey:
        root = self._roots.get((adapter, salt))
        if root is None:
            if len(self._roots) > 4096:  # salts come from clients: bounded
                self._roots.clear()
            root = self._roots[adapter, salt] = root_key(self._fingerprint, adapter, salt)
        return root
