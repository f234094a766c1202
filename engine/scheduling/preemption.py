"""Preemption: which running requests a newcomer displaces, and what becomes of them.

The order of service says whether one request gives way to another. Blocks are counted before any request is
displaced, so that none gives way in vain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from engine.kv.manager import KVManager
from engine.request import Request, RequestStatus
from engine.scheduled_step import ScheduledStep
from engine.scheduling.order import ServiceOrder
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.stopping import is_full
from kvstore.types import BlockId


class Preemption:
    """Takes requests out of the batch: by swapping their KV to the host tier, or to be recomputed."""

    def __init__(
        self,
        queues: RequestQueues,
        kv: KVManager,
        order: ServiceOrder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        by_swap: bool,
    ) -> None:
        self.num_preemptions = 0
        self._queues = queues
        self._kv = kv
        self._order = order
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._by_swap = by_swap

    def preempt(self, victim: Request, step: ScheduledStep) -> int:
        """Take all blocks from `victim`; returns the tokens that its row in this step had."""
        row = step.rows.pop(victim, None)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._queues.forget(victim)
        has_drafts = victim.num_pending_tokens > 1  # in flight: which of them are computed is not known
        is_pooled = bool(victim.params.pooling)  # what the runner keeps of its rows goes with its state
        if self._by_swap and not has_drafts and not is_pooled and self._kv.swap_out(victim, step):
            self._queues.move(victim, RequestStatus.SWAPPED)
        else:
            self._kv.release(victim, is_used=True)
            victim.num_computed_tokens = 0
            self._queues.move(victim, RequestStatus.WAITING)
        return 0 if row is None else row.num_tokens

    def victims_for(self, request: Request, max_tokens: int, moved: Collection[Request]) -> list[Request] | None:
        """The fewest running requests, least urgent first, without which `request` has room; None: it has to wait.

        max_tokens: of its first step. moved: requests that must stay where this step has put them.
        """
        running = self._queues.running
        missing_seats = self._queues.num_active + 1 - self._max_num_seqs
        if missing_seats > 0 and not (running and self._order.gives_way(running[-1], request)):
            return None  # before its prefix is looked up: under load this is the answer of every step
        missing_blocks = self._num_missing_blocks(request, max_tokens)
        victims: list[Request] = []
        if missing_seats <= 0 and missing_blocks <= 0:
            return victims
        freed = _FreedBlocks(self._kv, request)
        for victim in reversed(running):
            if victim in moved or not self._order.gives_way(victim, request):
                return None
            if victim.prefill_only and is_full(victim, self._max_model_len):
                return None  # ends with the step in flight, and its blocks go to a peer
            victims.append(victim)
            missing_seats -= 1
            missing_blocks -= freed.add(victim) + self._kv.blocks_per_position  # what is kept for it, see below
            if missing_seats <= 0 and missing_blocks <= 0:
                return victims
        return None

    def _num_missing_blocks(self, request: Request, max_tokens: int) -> int:
        """Blocks to free before `request` can start; negative: so many are left.

        A block of each KV group is kept for each running request, or its next token evicts the newcomer.
        """
        kv = self._kv
        num_spare = kv.pool.num_available - len(self._queues.running) * kv.blocks_per_position
        most = kv.num_blocks_for(request.num_tokens)
        if most <= num_spare:  # whatever caches have: a long prompt has 1,000 blocks to look up
            return most - num_spare
        if request.status is RequestStatus.SWAPPED:
            num_new = min(request.num_uncomputed_tokens, max_tokens)
            needed = kv.num_blocks_to_resume(request, request.num_computed_tokens + num_new)
        else:
            needed = kv.num_blocks_to_admit(request)
        return needed - num_spare


class _FreedBlocks:
    """Counts the blocks that `newcomer` could have if requests gave way to it one after the other."""

    def __init__(self, kv: KVManager, newcomer: Request) -> None:
        self._kv = kv
        self._pool = kv.pool
        self._counts: Counter[BlockId] = Counter()
        # It shares these already: releasing them gains it nothing.
        self._shared = set(kv.cached_blocks(newcomer)) if newcomer.status is RequestStatus.WAITING else set()

    def add(self, victim: Request) -> int:
        """Number of further blocks that preempting `victim` frees: those without any other reference."""
        held = self._kv.held_blocks(victim)
        self._counts.update(held)
        return sum(
            1
            for block_id in held
            if self._counts[block_id] == self._pool.refcount(block_id) and block_id not in self._shared
        )
