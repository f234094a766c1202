"""Admission: which waiting and swapped requests start in a step, and with how many tokens."""

from __future__ import annotations

from engine.kv.manager import KVManager
from engine.request import Request, RequestStatus
from engine.scheduled_step import ScheduledStep
from engine.scheduling.order import ServiceOrder
from engine.scheduling.preemption import Preemption
from engine.scheduling.remote_kv import RemoteKv
from engine.scheduling.request_queues import RequestQueues


class Admission:
    """Starts requests in the policy's order while the step, the batch and the block pool have room."""

    def __init__(
        self,
        queues: RequestQueues,
        kv: KVManager,
        order: ServiceOrder,
        preemption: Preemption,
        remote_kv: RemoteKv,
        max_replay_tokens: int,
        cuts_prompts: bool,
    ) -> None:
        """cuts_prompts: whether a prompt may be computed in several steps; else one starts where it fits whole."""
        self._cuts_prompts = cuts_prompts
        self._queues = queues
        self._max_replay_tokens = max_replay_tokens
        self._kv = kv
        self._order = order
        self._preemption = preemption
        self._remote_kv = remote_kv

    def admit(self, step: ScheduledStep, budget: int) -> None:
        """Start swapped and waiting requests until one of them has to wait. budget: tokens that the step has left.

        One that gave way with a token pending waits until that is known: it starts anew.
        """
        while (request := self._first_in_line()) is not None and self._is_admitted(request):
            is_cut = request.num_uncomputed_tokens > budget
            if request.num_pending_tokens or (is_cut and not self._cuts_prompts):
                return
            found = self._preemption.make_room(request, step, budget)
            if found is None:
                return
            if request.status is RequestStatus.SWAPPED:
                budget = found - self._resume(request, step, min(found, max(budget, 1)))
            else:
                budget = found - self._start(request, step, found)

    def _first_in_line(self) -> Request | None:
        """Swapped requests go before waiting ones, except before one to which they would give way."""
        waiting, swapped = self._queues.waiting, self._queues.swapped
        if not swapped or (waiting and self._order.gives_way(swapped[0], waiting[0])):
            return waiting[0] if waiting else None
        return swapped[0]

    def _is_admitted(self, request: Request) -> bool:
        return not self._queues.num_active or self._order.admits(request, self._queues, self._kv)

    def _resume(self, request: Request, step: ScheduledStep, budget: int) -> int:
        """Bring a swapped request back; returns the tokens of its row."""
        self._kv.swap_in(request, step)
        return self._run(request, step, budget)

    def _start(self, request: Request, step: ScheduledStep, budget: int) -> int:
        """Give a waiting request what caches have and a row for the rest, or start its load; returns its tokens."""
        reusable = request.num_reusable_tokens
        num_cached = self._kv.attach_cached(request, reusable)
        if request.kv_source is not None:
            num_kept = self._remote_kv.start_load(request, num_cached)
            if num_kept is not None:
                self._count_cache_use(request, num_kept)
                return 0
        num_cached += self._kv.attach_from_host(request, reusable, step)
        self._count_cache_use(request, num_cached)
        request.num_computed_tokens = num_cached
        return self._run(request, step, budget)

    def _run(self, request: Request, step: ScheduledStep, budget: int) -> int:
        num_new = 0 if request.is_held else request.num_row_tokens(budget, self._max_replay_tokens)
        grown = self._kv.grow(request, request.num_computed_tokens + num_new)
        assert grown, "victims_for has checked the room"
        self._queues.move(request, RequestStatus.RUNNING)
        if num_new:  # else it is held, or what it was to load is cached here, and the step is full
            step.add_row(request, num_new)
        return num_new

    def _count_cache_use(self, request: Request, num_cached: int) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            self._kv.stats.queried_tokens += request.num_prompt_tokens
            self._kv.stats.hit_tokens += request.num_cached_tokens
