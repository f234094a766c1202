"""Which running requests a newcomer displaces.

The order of service says whether one request gives way to another. Blocks are counted before any request is
displaced, so that none gives way in vain.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter

from engine.kv.manager import KVManager
from engine.request import Request, RequestStatus
from engine.scheduled_step import ScheduledStep
from engine.scheduling.admission import Admission
from engine.scheduling.stopping import is_full
from kvstore.types import BlockId

_rank = attrgetter("rank")


@dataclass(eq=False)
class Displacement(Admission):
    """Lets newcomers have the places of requests that give way to them."""

    _step: ScheduledStep | None = None
    _moved: set[Request] = field(default_factory=set)  # by this step, which leaves them where it has put them

    def _make_room(self, request: Request, step: ScheduledStep, budget: int) -> int | None:
        """See Admission: preempt requests that give way, or with an empty budget take the row of one of them.

        A request moves once a step at most: KV that is swapped in by a step cannot be swapped out by it
        (docs/decisions/steps-and-plans.md).
        """
        if step is not self._step:
            self._step, self._moved = step, set()
        if request in self._moved:
            return None
        loads = request.kv_source is not None
        last = None if budget or loads else self._last_in_step(request, step)
        if budget == 0 and last is None and not loads:
            return None
        victims = self._victims_for(request, max(budget, 1))
        if victims is None:
            return None
        for victim in victims:
            budget += self.preempt(victim, step)
        if budget == 0 and last is not None:  # keeps its blocks and place in the queue, but sits this step out
            budget += step.rows.pop(last).num_tokens
        self._moved.update(victims)
        self._moved.add(request)
        return budget

    def _victims_for(self, request: Request, max_tokens: int) -> list[Request] | None:
        """The fewest running requests without which `request` has room, least urgent first; None: it has to wait.

        max_tokens: of its first step.
        """
        running = self.queues.running
        missing_seats = self._num_missing_seats()
        if missing_seats > 0 and not (running and self.order.gives_way(running[-1], request)):
            return None  # before its prefix is looked up: under load this is the answer of every step
        missing_blocks = self._num_missing_blocks(request, max_tokens)
        victims: list[Request] = []
        if missing_seats <= 0 and missing_blocks <= 0:
            return victims
        freed = _FreedBlocks(self.kv, request)
        for victim in reversed(running):
            if victim in self._moved or not self.order.gives_way(victim, request):
                return None
            if victim.prefill_only and is_full(victim):
                return None  # ends with the step in flight, and its blocks go to a peer
            victims.append(victim)
            missing_seats -= 1
            missing_blocks -= freed.add(victim) + self.kv.blocks_per_position  # what is kept for it
            if missing_seats <= 0 and missing_blocks <= 0:
                return victims
        return None

    def _last_in_step(self, request: Request, step: ScheduledStep) -> Request | None:
        """The least urgent request with a row in this step, if it gives way to `request`."""
        last = max(step.rows, key=_rank, default=None)
        return last if last is not None and self.order.gives_way(last, request) else None


class _FreedBlocks:
    """Counts the blocks that `newcomer` could have if requests gave way to it one after the other."""

    def __init__(self, kv: KVManager, newcomer: Request) -> None:
        self.kv, self._pool = kv, kv.pool
        self._counts: Counter[BlockId] = Counter()
        # It shares these already: releasing them gains it nothing.
        is_new = newcomer.status is RequestStatus.WAITING
        self._shared = set(kv.prefixes.cached_table(newcomer, newcomer.num_reusable_tokens)) if is_new else set()

    def add(self, victim: Request) -> int:
        """Number of further blocks that preempting `victim` frees: those without any other reference."""
        block_ids = self.kv.blocks_of(victim)
        self._counts.update(block_ids)
        return sum(
            1
            for block_id in block_ids
            if self._counts[block_id] == self._pool.refcount(block_id) and block_id not in self._shared
        )
