"""A KV manager with a host tier behind its pool: evicted prefixes come back, preempted requests are swapped.

Copies are only written into the step, for the runner to execute: it reads and writes slots that are pinned until the
step has ended.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.host_tier.prefixes import find_on_host
from engine.kv.manager import NO_BLOCK
from engine.kv_groups.block_groups import BlockGroups
from engine.kv_groups.manager import GroupedKVManager
from engine.request import Request
from engine.scheduled_step import ScheduledStep
from engine.wings import Figures
from kvstore.pool.block_pool import BlockPool
from kvstore.tier.host_tier import HostTier
from kvstore.types import BlockId


class TieredKVManager(GroupedKVManager):
    """See KVManager."""

    def __init__(
        self, pool: BlockPool, groups: BlockGroups, fingerprint: str, host_tier: HostTier, by_swap: bool = False
    ) -> None:
        """by_swap: preempted requests keep their KV in the tier, if it has room."""
        super().__init__(pool, groups, fingerprint)
        self.host_tier = host_tier
        self._by_swap = by_swap
        self.num_hit_tokens = 0  # of prompts; these two since the start
        self.num_stored_blocks = 0

    def figures(self) -> Figures:
        """See Counting."""
        return {
            "mini_infer_host_tier_hit_tokens": [self.num_hit_tokens],
            "mini_infer_host_tier_stored_blocks": [self.num_stored_blocks],
        }

    def attach_from_host(self, request: Request, max_tokens: int, step: ScheduledStep) -> int:
        if not self.pool.enable_prefix_cache:
            return 0
        first = len(request.block_ids) // self.blocks_per_position
        last = min(max_tokens // self.block_size, len(request.block_keys))
        if first >= last:
            return 0
        last, slots = find_on_host(self.host_tier, self.groups, request, first, last)
        blocks = self.pool.allocate(len(slots))
        step.copies_in.extend(zip(slots.values(), blocks, strict=True))
        request.block_ids += [NO_BLOCK] * (last * self.blocks_per_position - len(request.block_ids))
        for entry, block_id in zip(slots, blocks, strict=True):
            request.block_ids[entry] = block_id
        num_tokens = (last - first) * self.block_size
        self.num_hit_tokens += num_tokens
        return num_tokens

    def release(self, request: Request, is_used: bool = False) -> None:
        super().release(request, is_used)
        if request.host_slots:
            self.host_tier.unpin(request.host_slots)
            request.host_slots = []

    def swap_out(self, request: Request, step: ScheduledStep) -> bool:
        has_drafts = request.num_pending_tokens > 1  # in flight: which of them are computed is not known
        is_pooled = bool(request.params.pooling)  # what the runner keeps of its rows goes with its state
        if not self._by_swap or has_drafts or is_pooled:
            return False
        live = self.groups.live_entries(request.num_computed_tokens, request.num_computed_tokens)
        slots = self.host_tier.reserve([None] * len(live)) if live else None
        if slots is None:
            return False
        step.copies_out.extend((request.block_ids[entry], slot) for entry, slot in zip(live, slots, strict=True))
        self.release(request, is_used=True)
        request.host_slots = slots
        return True

    def num_blocks_to_swap_in(self, request: Request, num_tokens: int) -> int:
        return self.groups.num_live(request.num_computed_tokens, num_tokens)

    def swap_in(self, request: Request, step: ScheduledStep) -> None:
        num_tokens = request.num_computed_tokens
        request.block_ids = [NO_BLOCK] * self.num_blocks_for(num_tokens)
        blocks = self.pool.allocate(len(request.host_slots))
        for entry, block_id in zip(self.groups.live_entries(num_tokens, num_tokens), blocks, strict=True):
            request.block_ids[entry] = block_id
        step.copies_in.extend(zip(request.host_slots, blocks, strict=True))
        request.host_slots = []

    def offload_evicted(self, step: ScheduledStep) -> None:
        evicted = self.pool.take_evicted()
        if not evicted:
            return
        missing = set(self.host_tier.missing([key for _, key in evicted]))
        kept = [entry for entry in evicted if entry[1] in missing]
        while kept:
            slots = self.host_tier.reserve([key for _, key in kept])
            if slots is not None:
                step.copies_out.extend((block, slot) for (block, _), slot in zip(kept, slots, strict=True))
                step.offload_slots.extend(slots)
                self.num_stored_blocks += len(slots)
                return
            kept = kept[: len(kept) // 2]  # the tier is nearly all pinned: keep what fits

    def launched(self, step: ScheduledStep) -> None:
        super().launched(step)
        if step.copies_out or step.copies_in:
            copied = [block_id for block_id, _ in step.copies_out] + [block_id for _, block_id in step.copies_in]
            step.freed.append(copied)

    def is_used(self, block_ids: Collection[BlockId], step: ScheduledStep) -> bool:
        """See KVManager."""
        copied = {block_id for block_id, _ in step.copies_out}
        return not copied.isdisjoint(block_ids) or super().is_used(block_ids, step)

    def finish_copies(self, step: ScheduledStep) -> None:
        if step.offload_slots:
            self.host_tier.commit(step.offload_slots)
            self.host_tier.unpin(step.offload_slots)
        if step.copies_in:
            self.host_tier.unpin([slot for slot, _ in step.copies_in])
