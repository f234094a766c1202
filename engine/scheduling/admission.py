"""Admission and preemption: starts waiting and swapped requests in a step, and preempts running ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.kv.manager import KVManager
from engine.request import Request, RequestStatus
from engine.scheduled_step import ScheduledStep
from engine.scheduling.order import ServiceOrder
from engine.scheduling.remote_kv import RemoteKv
from engine.scheduling.request_queues import RequestQueues

RowTokens = Callable[[Request, int], int]
"""(request, budget) -> number of tokens of its row in the next step."""


@dataclass(eq=False)
class Admission:
    """Starts requests in the order of service while the step, the batch and the block pool have room."""

    queues: RequestQueues
    kv: KVManager
    order: ServiceOrder
    remote_kv: RemoteKv
    max_num_seqs: int
    row_tokens: RowTokens
    cuts_prompts: bool  # whether a prompt may be computed in several steps; else it starts once it fits into one
    num_preemptions: int = 0

    def admit(self, step: ScheduledStep, budget: int) -> None:
        """Start swapped and waiting requests until one of them has to wait. budget: tokens that the step has left.

        A request that was preempted with a token pending waits until the token is known.
        """
        while (request := self._first_in_line()) is not None and self._is_admitted(request):
            is_cut = request.num_uncomputed_tokens > budget
            if request.num_pending_tokens or (is_cut and not self.cuts_prompts):
                return
            tokens_left = self._make_room(request, step, budget)
            if tokens_left is None:
                return
            if request.status is RequestStatus.SWAPPED:
                self.kv.swap_in(request, step)
                budget = tokens_left - self._run(request, step, min(tokens_left, max(budget, 1)))
            else:
                budget = tokens_left - self._start(request, step, tokens_left)

    def preempt(self, victim: Request, step: ScheduledStep) -> int:
        """Take all blocks from `victim`. Returns the number of tokens of its row in this step, which is dropped."""
        row = step.rows.pop(victim, None)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.queues.forget(victim)
        if self.kv.swap_out(victim, step):
            self.queues.move(victim, RequestStatus.SWAPPED)
        else:
            self.kv.release(victim, is_used=True)
            victim.num_computed_tokens = 0
            self.queues.move(victim, RequestStatus.WAITING)
        return 0 if row is None else row.num_tokens

    def _first_in_line(self) -> Request | None:
        """Return the next request: swapped requests precede waiting ones, unless they would give way to them."""
        waiting, swapped = self.queues.waiting, self.queues.swapped
        if not swapped or (waiting and self.order.gives_way(swapped[0], waiting[0])):
            return waiting[0] if waiting else None
        return swapped[0]

    def _is_admitted(self, request: Request) -> bool:
        return not self.queues.num_active or self.order.admits(request, self.queues, self.kv)

    def _make_room(self, request: Request, step: ScheduledStep, budget: int) -> int | None:
        """Return the tokens that `step` has left for `request`; None: it has to wait. budget: tokens left now.

        A load needs none. No request is preempted here; `engine/priorities/displacement.py` does that.
        """
        if budget == 0 and request.kv_source is None:
            return None
        has_room = self._num_missing_seats() <= 0 and self._num_missing_blocks(request, max(budget, 1)) <= 0
        return budget if has_room else None

    def _num_missing_seats(self) -> int:
        """Return how many requests have to leave before another one can start; zero or less: none."""
        return self.queues.num_active + 1 - self.max_num_seqs

    def _num_missing_blocks(self, request: Request, max_tokens: int) -> int:
        """Return how many blocks to free before `request` can start; negative: so many are spare.

        A block of each KV group is kept for each running request, whose next token would else preempt the new one.
        """
        kv = self.kv
        num_spare = kv.pool.num_available - len(self.queues.running) * kv.blocks_per_position
        num_blocks = kv.num_blocks_for(request.num_tokens)
        if num_blocks <= num_spare:  # it fits without caches, and looking up a long prompt means 1,000 blocks
            return num_blocks - num_spare
        if request.status is RequestStatus.SWAPPED:
            num_new = min(request.num_uncomputed_tokens, max_tokens)
            needed = kv.num_blocks_to_swap_in(request, request.num_computed_tokens + num_new)
        else:
            needed = kv.num_blocks_to_admit(request)
        return needed - num_spare

    def _start(self, request: Request, step: ScheduledStep, budget: int) -> int:
        """Give a waiting request its cached prefix and a row, or start its load. Returns the tokens of the row."""
        reusable = request.num_reusable_tokens
        num_cached = self.kv.attach_cached(request, reusable)
        if request.kv_source is not None:
            num_kept = self.remote_kv.start_load(request, num_cached)
            if num_kept is not None:
                self._count_cache_use(request, num_kept)
                return 0
        num_cached += self.kv.attach_from_host(request, reusable, step)
        self._count_cache_use(request, num_cached)
        request.num_computed_tokens = num_cached
        return self._run(request, step, budget)

    def _run(self, request: Request, step: ScheduledStep, budget: int) -> int:
        num_new = 0 if request.is_held else self.row_tokens(request, budget)
        grown = self.kv.grow(request, request.num_computed_tokens + num_new)
        assert grown, "_make_room has checked the room"
        self.queues.move(request, RequestStatus.RUNNING)
        if num_new:  # else it is held, or its load became unnecessary and the step is full
            step.add_row(request, num_new)
        return num_new

    def _count_cache_use(self, request: Request, num_cached: int) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            self.kv.stats.queried_tokens += request.num_prompt_tokens
            self.kv.stats.hit_tokens += request.num_cached_tokens
