"""Continuous batching: which requests compute how many tokens in the next step, and who must give way.

One notion drives everything: a request has `num_tokens` known and `num_computed_tokens` in the KV cache, and a step
closes part of that gap. A prompt, a chunk of it, a decode token and a recompute after preemption are the same case.
Pure Python on plain data: no torch, no clock, no I/O. The loop around it is `schedule -> run -> update`. Whom to
serve first is the policy's to say, and `end_conditions` knows when a request has ended.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from common.errors import ContextLengthError
from engine.end_conditions import append_tokens, is_full
from engine.kv_manager import KVManager
from engine.policy import PriorityPolicy, SchedulingPolicy
from engine.request import (
    FinishReason,
    LoadJob,
    Request,
    RequestId,
    RequestOutput,
    RequestStatus,
    ScheduledRow,
    SchedulerLoad,
    StepPlan,
    StepResult,
)
from kvstore.types import BlockId


class Scheduler:
    """Owns all requests of one engine from `add` to the output that ends them."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        preempt_by_swap: bool = False,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self.kv = kv
        self.max_model_len = min(max_model_len, kv.pool.num_blocks * kv.block_size)
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._preempt_by_swap = preempt_by_swap
        self._policy = policy or PriorityPolicy()
        self._requests: dict[RequestId, Request] = {}
        self._waiting: list[Request] = []  # these three are kept in the policy's order
        self._swapped: list[Request] = []
        self._running: list[Request] = []
        self._loading: dict[RequestId, Request] = {}
        self._cancelled_loads: set[RequestId] = set()
        self._load_jobs: list[LoadJob] = []
        self._num_arrived = 0

    # -- requests come and go --------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Accept a request. Raises ContextLengthError when it can never fit."""
        if request.num_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {request.num_tokens} tokens, and this model takes at most {self.max_model_len} "
                "for prompt and output together",
                "prompt",
            )
        assert request.request_id not in self._requests
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=self._policy.key)

    def abort(self, request_id: RequestId) -> Request | None:
        """Forget a request and free what it holds; None when it is not here (any more)."""
        request = self._requests.get(request_id)
        if request is None or request_id in self._cancelled_loads:
            return None
        if request.status is RequestStatus.LOADING:
            self._cancelled_loads.add(request_id)  # its blocks are being written: they are freed by finish_load
            return request
        self._queue_of(request).remove(request)
        self._finish(request)
        return request

    def has_work(self) -> bool:
        """Whether `schedule` can make progress now (a load in flight is not work)."""
        return bool(self._waiting or self._running or self._swapped)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def requests(self) -> Iterable[Request]:
        return self._requests.values()

    def waiting(self) -> list[Request]:
        return list(self._waiting)

    def load(self) -> SchedulerLoad:
        gap = sum(r.num_tokens for r in self._waiting)
        gap += sum(
            r.num_tokens - r.num_computed_tokens for r in self._running if r.num_tokens - r.num_computed_tokens > 1
        )
        return SchedulerLoad(len(self._running), len(self._waiting), len(self._swapped), len(self._loading), gap)

    # -- one step --------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step. Decode rows first, then chunks of prompts, oldest first."""
        plan = StepPlan()
        preempted = self._schedule_running(plan)
        if not preempted:
            self._resume_swapped(plan)
            self._admit_waiting(plan)
        plan.rows.sort(key=lambda row: row.num_new_tokens > 1)  # stable: decode rows first
        self.kv.offload_evicted(plan)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """Count what `plan` will compute as done, and one pending token for each row that samples.

        The next `schedule` may then be called before the step has ended.
        """
        for row in plan.rows:
            row.request.num_computed_tokens = row.start + row.num_new_tokens
            row.request.num_pending_tokens += row.samples

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply what the step computed; returns an output for each row that sampled, ended or failed."""
        self.kv.finish_copies(plan)
        outputs: list[RequestOutput] = []
        for index, row in enumerate(plan.rows):
            request = row.request
            request.num_pending_tokens -= row.samples
            if request.status is RequestStatus.FINISHED:
                continue  # aborted, or found to have ended, while the step ran
            if index in result.errors:
                self._queue_of(request).remove(request)
                self._finish(request)
                outputs.append(RequestOutput(request, [], error=result.errors[index]))
                continue
            if request.status is RequestStatus.RUNNING:  # else it gave way while the step ran
                self.kv.publish(request)
            if result.prompt_logprobs[index] and not request.output_token_ids:
                request.prompt_logprobs.extend(result.prompt_logprobs[index])
            if row.samples:
                output = append_tokens(request, result, index, self.max_model_len)
                if output.finish_reason is not None:
                    self._queue_of(request).remove(request)
                    self._finish(request, keep_blocks=output.finish_reason is FinishReason.PREFILLED)
                outputs.append(output)
        return outputs

    def detach_blocks(self, request: Request) -> list[BlockId]:
        """Hand the blocks of a request that ended with PREFILLED to the caller, with their references."""
        block_ids, request.block_ids = request.block_ids, []
        return block_ids

    # -- KV that comes from a peer ---------------------------------------------------------------------------

    def take_load_jobs(self) -> list[LoadJob]:
        """Loads that `schedule` has reserved blocks for since the last call."""
        jobs, self._load_jobs = self._load_jobs, []
        return jobs

    def finish_load(self, request_id: RequestId, ok: bool) -> Request | None:
        """A load has ended; None when its request was cancelled meanwhile.

        After a failure the request keeps its blocks and computes what they lack.
        """
        request = self._loading.pop(request_id)
        if request_id in self._cancelled_loads:
            self._cancelled_loads.remove(request_id)
            self._finish(request)
            return None
        if ok:
            request.num_computed_tokens = request.num_source_tokens
            self.kv.publish(request)
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=self._policy.key)
        return request

    # -- inside a step ---------------------------------------------------------------------------------------

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Rows for the running requests; True when somebody had to give way."""
        budget, limit = self._max_num_batched_tokens, self.max_model_len
        decodes = [r for r in self._running if r.num_tokens - r.num_computed_tokens == 1 and not is_full(r, limit)]
        prefills = [r for r in self._running if r.num_tokens - r.num_computed_tokens > 1]
        preempted = False
        for request in decodes + prefills:
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # gave way to an earlier one of this loop
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self.kv.grow(request, request.num_computed_tokens + num_new):
                victim = self._running[-1]
                budget += self._preempt(victim, plan)
                preempted = True
                if victim is request:
                    break
            if request.status is RequestStatus.RUNNING:
                self._add_row(plan, request, num_new)
                budget -= num_new
        return preempted

    def _preempt(self, victim: Request, plan: StepPlan) -> int:
        """Take all blocks from `victim`; returns the tokens that its row in this plan had."""
        self._running.remove(victim)
        refund = sum(row.num_new_tokens for row in plan.rows if row.request is victim)
        plan.rows = [row for row in plan.rows if row.request is not victim]
        victim.num_preemptions += 1
        self.num_preemptions += 1
        if self._preempt_by_swap and self.kv.swap_out(victim, plan):
            victim.status = RequestStatus.SWAPPED
            insort(self._swapped, victim, key=self._policy.key)
        else:
            self.kv.release(victim)
            victim.num_computed_tokens = 0
            victim.prompt_logprobs.clear()
            victim.status = RequestStatus.WAITING
            insort(self._waiting, victim, key=self._policy.key)
        return refund

    def _resume_swapped(self, plan: StepPlan) -> None:
        budget = self._max_num_batched_tokens - plan.num_tokens
        while self._swapped and budget > 0 and self._num_active < self._max_num_seqs:
            request = self._swapped[0]
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            needed = self.kv.num_blocks_for(request.num_computed_tokens + num_new)
            if not self._has_room_for(needed):
                return
            self._swapped.pop(0)
            self.kv.swap_in(request, plan)
            self._start(plan, request, num_new)
            budget -= num_new

    def _admit_waiting(self, plan: StepPlan) -> None:
        budget = self._max_num_batched_tokens - plan.num_tokens
        while self._waiting and not self._swapped and budget > 0 and self._num_active < self._max_num_seqs:
            request = self._waiting[0]
            # The last token must be computed, because its logits are what the step samples from.
            reusable = 0 if request.needs_prompt_logprobs else request.num_tokens - 1
            num_cached, num_idle = self.kv.num_cached_blocks(request, reusable)
            if not self._has_room_for(self.kv.num_blocks_for(request.num_tokens) - num_cached + num_idle):
                return
            self._waiting.pop(0)
            num_computed = self.kv.attach_cached(request, reusable)
            if request.kv_source is not None and self._start_load(request, num_computed):
                continue
            num_computed += self.kv.attach_from_host(request, reusable, plan)
            self._count_cache_use(request, num_computed)
            request.num_computed_tokens = num_computed
            num_new = min(request.num_tokens - num_computed, budget)
            self._start(plan, request, num_new)
            budget -= num_new

    def _has_room_for(self, num_blocks: int) -> bool:
        """Whether to admit: keep a block for each running request, or its next token evicts the newcomer."""
        reserve = len(self._running)
        return num_blocks + reserve <= self.kv.pool.num_available

    def _start(self, plan: StepPlan, request: Request, num_new: int) -> None:
        grown = self.kv.grow(request, request.num_computed_tokens + num_new)
        assert grown, "admission checked the room"
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=self._policy.key)
        self._add_row(plan, request, num_new)

    def _add_row(self, plan: StepPlan, request: Request, num_new: int) -> None:
        start = request.num_computed_tokens
        plan.rows.append(ScheduledRow(request, start, num_new, start + num_new == request.num_tokens))

    def _start_load(self, request: Request, num_cached: int) -> bool:
        """Let the source fill what is not cached here; False when that would not save a whole block of computing."""
        source, request.kv_source = request.kv_source, None  # one attempt: a preempted request recomputes
        if request.num_source_tokens - num_cached < self.kv.block_size:
            self._load_jobs.append(LoadJob(request, source, [], []))
            return False
        grown = self.kv.grow(request, request.num_source_tokens)
        assert grown, "admission checked the room"
        self._count_cache_use(request, num_cached)
        request.num_computed_tokens = num_cached
        request.status = RequestStatus.LOADING
        self._loading[request.request_id] = request
        first = num_cached // self.kv.block_size
        positions = list(range(first, self.kv.num_blocks_for(request.num_source_tokens)))
        self._load_jobs.append(LoadJob(request, source, positions, request.block_ids[first:]))
        return True

    def _count_cache_use(self, request: Request, num_computed: int) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
            self.kv.stats.queried_tokens += request.num_prompt_tokens
            self.kv.stats.hit_tokens += request.num_cached_tokens

    @property
    def _num_active(self) -> int:
        return len(self._running) + len(self._loading)

    def _finish(self, request: Request, keep_blocks: bool = False) -> None:
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        if not keep_blocks:
            self.kv.release(request)

    def _queue_of(self, request: Request) -> list[Request]:
        return {
            RequestStatus.WAITING: self._waiting,
            RequestStatus.RUNNING: self._running,
            RequestStatus.SWAPPED: self._swapped,
        }[request.status]
