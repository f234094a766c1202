"""Which running requests a newcomer displaces.

The order of service says whether one request gives way to another. Blocks are counted before any request is
displaced, so that none gives way in vain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from operator import attrgetter
from typing import Any

from engine.kv.manager import KVManager
from engine.request import Request, RequestStatus
from engine.scheduled_step import ScheduledStep
from engine.scheduling.order import ServiceOrder
from engine.scheduling.preemption import Preemption
from engine.scheduling.stopping import is_full
from kvstore.types import BlockId

_rank = attrgetter("rank")


class Displacement(Preemption):
    """Lets newcomers have the places of requests that give way to them."""

    def __init__(self, order: ServiceOrder, max_model_len: int, *own: Any) -> None:
        """own: what a Preemption has."""
        super().__init__(*own)
        self._order = order
        self._max_model_len = max_model_len

    def victims_for(self, request: Request, max_tokens: int, moved: Collection[Request]) -> list[Request] | None:
        """See Preemption: the fewest, least urgent first."""
        running = self._queues.running
        missing_seats = self._num_missing_seats()
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
            missing_blocks -= freed.add(victim) + self._kv.blocks_per_position  # what is kept for it
            if missing_seats <= 0 and missing_blocks <= 0:
                return victims
        return None

    def last_in_step(self, request: Request, step: ScheduledStep) -> Request | None:
        """See Preemption: the least urgent one, if it gives way to `request`."""
        last = max(step.rows, key=_rank, default=None)
        return last if last is not None and self._order.gives_way(last, request) else None


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
