"""Preemption: what becomes of running requests when blocks run out, and whether a newcomer has room."""

from __future__ import annotations

from engine.kv.manager import KVManager
from engine.request import Request, RequestStatus
from engine.scheduled_step import ScheduledStep
from engine.scheduling.request_queues import RequestQueues


class Preemption:
    """Takes requests out of the batch: by swapping their KV to the host tier, or to be recomputed."""

    def __init__(self, queues: RequestQueues, kv: KVManager, max_num_seqs: int) -> None:
        self.num_preemptions = 0
        self._queues = queues
        self._kv = kv
        self._max_num_seqs = max_num_seqs

    def preempt(self, victim: Request, step: ScheduledStep) -> int:
        """Take all blocks from `victim`; returns the tokens that its row in this step had."""
        row = step.rows.pop(victim, None)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._queues.forget(victim)
        if self._kv.swap_out(victim, step):
            self._queues.move(victim, RequestStatus.SWAPPED)
        else:
            self._kv.release(victim, is_used=True)
            victim.num_computed_tokens = 0
            self._queues.move(victim, RequestStatus.WAITING)
        return 0 if row is None else row.num_tokens

    def make_room(self, request: Request, step: ScheduledStep, budget: int) -> int | None:
        """The tokens that `step` has left for `request`; None: it has to wait. budget: tokens that it has left now.

        A load takes none. Nobody gives way here; by priority some do, see `engine/priorities/displacement.py`.
        """
        if budget == 0 and request.kv_source is None:
            return None
        has_room = self._num_missing_seats() <= 0 and self._num_missing_blocks(request, max(budget, 1)) <= 0
        return budget if has_room else None

    def _num_missing_seats(self) -> int:
        """Requests that have to go before another one can start; zero or less: none."""
        return self._queues.num_active + 1 - self._max_num_seqs

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
            needed = kv.groups.num_live(request.num_computed_tokens, request.num_computed_tokens + num_new)
        else:
            needed = kv.num_blocks_to_admit(request)
        return needed - num_spare
