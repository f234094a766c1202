"""Continuous batching: which requests compute how many tokens in the next step, and who must give way.

One notion drives everything: a request has `num_tokens` known and `num_computed_tokens` in the KV cache, and a step
closes part of that gap. A prompt, a chunk of it, a decode token and a recompute after preemption are the same case.
Pure Python on plain data: no torch, no clock, no I/O. The loop around it is `schedule -> run -> update`. Whom to
serve first and who gives way to whom is the policy's to say, and `stopping` knows when a request has ended.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from math import inf
from operator import attrgetter

from common.errors import ContextLengthError
from common.step_times import num_pairs
from engine.kv_manager import BlocksFreed, KVManager
from engine.plan import ScheduledRow, StepResult
from engine.policy import EngineView, GuardedPolicy, PriorityPolicy, SchedulingPolicy
from engine.prefetches import Prefetches, PrefetchJob
from engine.prompt_budget import PromptBudget, WaitingPrompt
from engine.request import (
    FinishReason,
    LoadJob,
    PromptChunk,
    Request,
    RequestId,
    RequestOutput,
    RequestStatus,
    SchedulerLoad,
)
from engine.scheduled_step import ScheduledStep
from engine.speculation.drafts import Speculation
from engine.stopping import append_tokens, is_full
from kvstore.types import BlockId

_rank = attrgetter("rank")


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
        speculation: Speculation | None = None,
        prompt_budget: PromptBudget | None = None,
        num_stages: int = 1,
    ) -> None:
        """num_stages: of a pipeline, among whose steps in flight the requests that decode are divided."""
        self.kv = kv
        self.num_stages = num_stages
        self.prompt_budget = prompt_budget
        self.speculation = speculation
        self.prefetches = Prefetches(kv.pool)
        self.max_model_len = kv.longest_sequence(max_model_len)
        self.num_preemptions = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0  # drafts that equal the tokens sampled at their positions
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._preempt_by_swap = preempt_by_swap
        self._policy = GuardedPolicy(policy or PriorityPolicy())
        self._requests: dict[RequestId, Request] = {}
        self._waiting: list[Request] = []  # these three are sorted by rank
        self._swapped: list[Request] = []
        self._running: list[Request] = []
        self._awaiting: list[Request] = []
        self._loading: dict[RequestId, Request] = {}
        self._cancelled_loads: set[RequestId] = set()
        self._load_jobs: list[LoadJob] = []
        self._prompt_chunks: list[PromptChunk] = []
        self._forgotten: list[RequestId] = []  # the runner drops their state with the next step
        self._num_arrived = 0
        self._num_withheld = 0  # tokens of the step being planned

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
        request.rank = self._policy.rank(request)
        self._requests[request.request_id] = request
        if self._awaits_prefetch(request):
            request.status = RequestStatus.AWAITING
            self._awaiting.append(request)
        else:
            insort(self._waiting, request, key=_rank)

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

    def hand_over(self, request_id: RequestId) -> None:
        """Let a request end with PREFILLED at its next token. Does nothing when it is not here (any more)."""
        request = self._requests.get(request_id)
        if request is not None:
            request.prefill_only = True

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
        gap = sum(r.num_tokens for r in self._waiting if r.kv_source is None)
        gap += sum(
            r.num_tokens - r.num_computed_tokens for r in self._running if r.num_tokens - r.num_computed_tokens > 1
        )
        num_loading = len(self._loading) + len(self._awaiting)
        pairs, context = self._contexts() if self.prompt_budget is not None else (0, 0)
        return SchedulerLoad(
            len(self._running), len(self._waiting), len(self._swapped), num_loading, gap, pairs, context
        )

    def _contexts(self) -> tuple[int, int]:
        """Pairs of a prompt token that is not computed with each token before it; tokens of requests that decode."""
        pairs, context = 0.0, 0
        for request in self._running:
            num_left = request.num_tokens - request.num_computed_tokens
            if num_left > 1:
                pairs += num_pairs(request.num_computed_tokens, num_left)
            else:
                context += request.num_tokens
        pairs += sum(num_pairs(0, r.num_tokens) for r in self._waiting if r.kv_source is None)
        return round(pairs), context

    # -- one step --------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        """Plan the next step. Decode rows first, then chunks of prompts, oldest first."""
        if self._policy.has_failed:
            self._replace_policy()
        step = ScheduledStep()
        preempted = self._schedule_running(step)
        if not preempted and (self._waiting or self._swapped):
            self._admit(step)
        if self.speculation is not None:
            num_spare_tokens = self._max_num_batched_tokens - step.num_tokens
            # For the next token of each of the others.
            num_kept_blocks = (len(self._running) - 1) * self.kv.blocks_per_position
            self.speculation.add_drafts(step, self.kv, num_spare_tokens, num_kept_blocks, self.max_model_len)
        if self.prefetches.has_queued:
            self.prefetches.reserve(self._num_spare_blocks())
            self._stop_awaiting()
        self.kv.offload_evicted(step)
        if not step.is_empty:
            forgotten, self._forgotten = self._forgotten, []
            step.seal(forgotten)
        return step

    def advance(self, step: ScheduledStep) -> None:
        """Count what `step` will compute as done, and as pending the most tokens that its rows can sample.

        The next `schedule` may then be called before the step has ended.
        """
        for request, row in step.rows.items():
            request.num_computed_tokens = row.start + row.num_tokens
            request.num_pending_tokens += row.samples + len(row.draft_token_ids)

    def update(self, step: ScheduledStep, result: StepResult) -> list[RequestOutput]:
        """Apply what the step computed; returns an output for each row that sampled, ended or failed."""
        self.kv.finish_copies(step)
        outputs: list[RequestOutput] = []
        for index, (request, row) in enumerate(step.rows.items()):
            request.num_pending_tokens -= row.samples + len(row.draft_token_ids)
            if request.status is RequestStatus.FINISHED:
                continue  # aborted, or found to have ended, while the step ran
            if index in result.errors:
                self._queue_of(request).remove(request)
                self._finish(request)
                outputs.append(RequestOutput(request, [], error=result.errors[index]))
                continue
            if request.status is RequestStatus.RUNNING:  # else it gave way while the step ran
                self.kv.publish(request)
                if request.prefill_only and not row.samples:
                    self._prompt_chunks.append(PromptChunk(request, row.stop))
            num_missing = row.start - len(request.prompt_logprobs)  # negative: known, from before it gave way
            if result.prompt_logprobs[index] and not request.output_token_ids and num_missing <= 0:
                request.prompt_logprobs.extend(result.prompt_logprobs[index][-num_missing:])
            if row.samples:
                output = append_tokens(request, result, index, self.max_model_len)
                if row.draft_token_ids:
                    self._settle(request, row, len(result.token_ids[index]))
                if output.finish_reason is not None:
                    self._queue_of(request).remove(request)
                    self._finish(request, keep_blocks=output.finish_reason is FinishReason.PREFILLED)
                outputs.append(output)
        return outputs

    def _settle(self, request: Request, row: ScheduledRow, num_sampled: int) -> None:
        """Take back what `advance` counted for drafts that were not accepted. What they wrote is written again."""
        self.num_draft_tokens += len(row.draft_token_ids)
        self.num_accepted_tokens += num_sampled - 1
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens = row.start + num_sampled
            self.kv.publish(request)  # blocks that accepted drafts have filled

    def detach_blocks(self, request: Request) -> list[BlockId]:
        """Hand the blocks of a request that ended with PREFILLED to the caller, with their references.

        They hold the KV of all tokens but the last, which a step in flight may be computing into one block more.
        """
        return self.kv.detach(request, request.num_known_tokens - 1)

    def take_prompt_chunks(self) -> list[PromptChunk]:
        """Chunks of prompts for peers that have been computed since the last call."""
        chunks, self._prompt_chunks = self._prompt_chunks, []
        return chunks

    # -- KV that comes from a peer ---------------------------------------------------------------------------

    def take_load_jobs(self) -> list[LoadJob]:
        """Loads that `schedule` has reserved blocks for since the last call."""
        jobs, self._load_jobs = self._load_jobs, []
        return jobs

    def finish_load(self, request_id: RequestId, ok: bool) -> Request | None:
        """A load has ended; None when its request was cancelled meanwhile.

        After a failure the request computes what the load should have brought.
        """
        request = self._loading.pop(request_id)
        if request_id in self._cancelled_loads:
            self._cancelled_loads.remove(request_id)
            self._finish(request)
            return None
        if ok:
            request.num_computed_tokens = request.num_source_tokens
            self.kv.publish(request)
        else:
            self.kv.release_uncomputed(request)  # blocks that others can read are among them
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=_rank)
        return request

    def finish_prefetch(self, job: PrefetchJob, ok: bool) -> None:
        """A prefetch has ended: the prefix cache has its blocks, or after a failure nobody."""
        self.prefetches.finish(job, ok)
        self._stop_awaiting()

    def _awaits_prefetch(self, request: Request) -> bool:
        """Whether a peer's KV for `request` is on its way already, so that a load would copy it twice."""
        if request.kv_source is None:
            return False
        self.kv.extend_keys(request)
        return self.prefetches.has_any_of(request.block_keys)

    def _stop_awaiting(self) -> None:
        """Let requests go on whose prefetches have all ended, well or not."""
        for request in list(self._awaiting):
            if not self._awaits_prefetch(request):
                self._awaiting.remove(request)
                request.status = RequestStatus.WAITING
                insort(self._waiting, request, key=_rank)

    def _num_spare_blocks(self) -> int:
        """Blocks that nobody in this engine needs: beyond all known tokens of running requests, and the next ones."""
        if self._waiting or self._swapped:
            return 0
        missing = (self.kv.num_blocks_for(r.num_tokens) - len(r.block_ids) for r in self._running)
        return self.kv.pool.num_available - sum(max(count, 0) + self.kv.blocks_per_position for count in missing)

    # -- inside a step ---------------------------------------------------------------------------------------

    def _schedule_running(self, step: ScheduledStep) -> bool:
        """Rows for the running requests; True when somebody had to give way."""
        budget, limit = self._max_num_batched_tokens, self.max_model_len
        decodes = [r for r in self._running if r.num_tokens - r.num_computed_tokens == 1 and not is_full(r, limit)]
        if self.num_stages > 1:
            decodes = self._share_of(decodes)
        prefills = [r for r in self._running if r.num_tokens - r.num_computed_tokens > 1]
        preempted = False
        self._num_withheld = self._num_to_withhold(decodes, prefills)
        budget -= self._num_withheld
        for request in decodes + prefills:
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # gave way to an earlier one of this loop
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self.kv.grow(request, request.num_computed_tokens + num_new):
                victim = self._running[-1]
                budget += self._preempt(victim, step)
                preempted = True
                if victim is request:
                    break
            if request.status is RequestStatus.RUNNING:
                self._add_row(step, request, num_new)
                budget -= num_new
        return preempted

    def _share_of(self, decodes: list[Request]) -> list[Request]:
        """Select the requests of a pipeline's next step: an equal share, of those whose last token is known.

        Shares of all steps in flight together are at least all requests, so each is in one step of each round.
        """
        share = -(-len(decodes) // self.num_stages)
        return [request for request in decodes if not request.num_pending_tokens][:share]

    def _num_to_withhold(self, decodes: list[Request], prefills: list[Request]) -> int:
        """Tokens of the step that prompts must leave unused for the sake of its decode rows."""
        if self.prompt_budget is None or not (prefills or self._waiting):
            return 0
        left = self._max_num_batched_tokens - len(decodes)
        streams = [r for r in decodes if r.output_token_ids or r.num_pending_tokens]  # the rest are prompts
        if not streams or left <= 0:
            return 0
        context = sum(request.num_tokens for request in streams)
        waiting = (request for request in self._waiting if request.kv_source is None)
        prompts = [
            WaitingPrompt(r.num_tokens - r.num_computed_tokens, -inf if r.is_late else r.due, r.num_computed_tokens)
            for r in (*prefills, *waiting)
        ]
        return left - self.prompt_budget.num_tokens(len(streams), context, prompts, left)

    def _preempt(self, victim: Request, step: ScheduledStep) -> int:
        """Take all blocks from `victim`; returns the tokens that its row in this step had."""
        self._running.remove(victim)
        row = step.rows.pop(victim, None)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._forget(victim)
        has_drafts = victim.num_pending_tokens > 1  # in flight: which of them are computed is not known
        if self._preempt_by_swap and not has_drafts and self.kv.swap_out(victim, step):
            victim.status = RequestStatus.SWAPPED
            insort(self._swapped, victim, key=_rank)
        else:
            self.kv.release(victim)
            victim.num_computed_tokens = 0
            victim.status = RequestStatus.WAITING
            insort(self._waiting, victim, key=_rank)
        return 0 if row is None else row.num_tokens

    def _forget(self, request: Request) -> None:
        """Let the runner drop what it knows of `request`."""
        if request.num_planned_blocks >= 0:
            self._forgotten.append(request.request_id)
            request.num_planned_blocks = -1

    # -- admission -------------------------------------------------------------------------------------------

    def _admit(self, step: ScheduledStep) -> None:
        """Start swapped and waiting requests in the policy's order, until one of them has to wait.

        A request moves once a step at most: KV that is swapped in by this step cannot be swapped out by it
        (docs/decisions/0002). One that gave way with a token pending waits until that is known: it starts anew.
        """
        budget = max(self._max_num_batched_tokens - step.num_tokens - self._num_withheld, 0)
        moved: set[Request] = set()
        while (request := self._first_in_line()) is not None and request not in moved and self._is_admitted(request):
            if request.num_pending_tokens:
                return
            loads = request.kv_source is not None  # which takes no tokens of the step
            last = None if budget or loads else self._last_in_step(request, step)
            if budget == 0 and last is None and not loads:
                return
            max_tokens = max(budget, 1)  # with an empty budget it gets some of others, at least one
            victims = self._victims_for(request, max_tokens, moved)
            if victims is None:
                return
            for victim in victims:
                budget += self._preempt(victim, step)
            if budget == 0 and last is not None:  # keeps its blocks and place in the queue, but sits this step out
                budget += step.rows.pop(last).num_tokens
            moved.update(victims)
            moved.add(request)
            if request.status is RequestStatus.SWAPPED:
                budget -= self._resume(request, step, min(budget, max_tokens))
            else:
                budget -= self._start_waiting(request, step, budget)

    def _first_in_line(self) -> Request | None:
        """Swapped requests go before waiting ones, except before one to which they would give way."""
        if not self._swapped:
            return self._waiting[0] if self._waiting else None
        swapped = self._swapped[0]
        if self._waiting and self._policy.gives_way(swapped, self._waiting[0]):
            return self._waiting[0]
        return swapped

    def _is_admitted(self, request: Request) -> bool:
        return not self._num_active or self._policy.admits(request, self._engine_view())

    def _last_in_step(self, request: Request, step: ScheduledStep) -> Request | None:
        """The least urgent request in this step, if it gives way to `request`."""
        last = max(step.rows, key=_rank, default=None)
        return last if last is not None and self._policy.gives_way(last, request) else None

    def _victims_for(self, request: Request, max_tokens: int, moved: set[Request]) -> list[Request] | None:
        """The fewest running requests, least urgent first, without which `request` has room; None: it has to wait."""
        missing_seats = self._num_active + 1 - self._max_num_seqs
        if missing_seats > 0 and not (self._running and self._policy.gives_way(self._running[-1], request)):
            return None  # before its prefix is looked up: under load this is the answer of every step
        missing_blocks = self._num_missing_blocks(request, max_tokens)
        victims: list[Request] = []
        if missing_seats <= 0 and missing_blocks <= 0:
            return victims
        freed = BlocksFreed(self.kv, request)
        for victim in reversed(self._running):
            if victim in moved or not self._policy.gives_way(victim, request):
                return None
            if victim.prefill_only and is_full(victim, self.max_model_len):
                return None  # ends with the step in flight, and its blocks go to a peer
            victims.append(victim)
            missing_seats -= 1
            missing_blocks -= freed.add(victim) + self.kv.blocks_per_position  # what is kept for it, see below
            if missing_seats <= 0 and missing_blocks <= 0:
                return victims
        return None

    def _num_missing_blocks(self, request: Request, max_tokens: int) -> int:
        """Blocks to free before `request` can start; negative: so many are left.

        A block of each KV group is kept for each running request, or its next token evicts the newcomer.
        """
        if request.status is RequestStatus.SWAPPED:
            num_new = min(request.num_tokens - request.num_computed_tokens, max_tokens)
            needed = self.kv.num_blocks_to_resume(request, request.num_computed_tokens + num_new)
        else:
            needed = self.kv.num_blocks_to_admit(request)
        return needed + len(self._running) * self.kv.blocks_per_position - self.kv.pool.num_available

    def _resume(self, request: Request, step: ScheduledStep, budget: int) -> int:
        """Bring a swapped request back; returns the tokens of its row."""
        num_new = min(request.num_tokens - request.num_computed_tokens, budget)
        self._swapped.remove(request)
        self.kv.swap_in(request, step)
        self._start(step, request, num_new)
        return num_new

    def _start_waiting(self, request: Request, step: ScheduledStep, budget: int) -> int:
        """Give a waiting request what caches have and a row for the rest, or start its load; returns its tokens."""
        reusable = request.num_reusable_tokens
        self._waiting.remove(request)
        num_computed = self.kv.attach_cached(request, reusable)
        if request.kv_source is not None and self._start_load(request, num_computed):
            return 0
        num_computed += self.kv.attach_from_host(request, reusable, step)
        self._count_cache_use(request, num_computed)
        request.num_computed_tokens = num_computed
        num_new = min(request.num_tokens - num_computed, budget)
        self._start(step, request, num_new)
        return num_new

    def _start(self, step: ScheduledStep, request: Request, num_new: int) -> None:
        grown = self.kv.grow(request, request.num_computed_tokens + num_new)
        assert grown, "admission checked the room"
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=_rank)
        self._add_row(step, request, num_new)

    def _add_row(self, step: ScheduledStep, request: Request, num_new: int) -> None:
        start = request.num_computed_tokens
        if not num_new:
            return  # what it was to load is cached here, and the step is full: its row is in the next one
        step.rows[request] = ScheduledRow(request.request_id, start, num_new, start + num_new == request.num_tokens)

    def _start_load(self, request: Request, num_cached: int) -> bool:
        """Let the source fill what is not cached here; False when that would not save a whole block of computing."""
        source, request.kv_source = request.kv_source, None  # one attempt: a preempted request recomputes
        request.num_prefetched_tokens = self.prefetches.take_fetched(request.block_keys) * self.kv.block_size
        if request.num_source_tokens - num_cached < self.kv.block_size:
            self._load_jobs.append(LoadJob(request, source, [], [], 0))
            return False
        fresh, num_kept = self.kv.attach_for_load(request, request.num_source_tokens)
        self._count_cache_use(request, num_kept)
        request.num_computed_tokens = num_cached
        request.status = RequestStatus.LOADING
        self._loading[request.request_id] = request
        num_tokens = request.num_source_tokens - num_kept
        self._load_jobs.append(LoadJob(request, source, list(fresh), list(fresh.values()), num_tokens))
        return True

    def _count_cache_use(self, request: Request, num_computed: int) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
            self.kv.stats.queried_tokens += request.num_prompt_tokens
            self.kv.stats.hit_tokens += request.num_cached_tokens

    # -- what the policy sees --------------------------------------------------------------------------------

    def _engine_view(self) -> EngineView:
        pool = self.kv.pool
        num_waiting = len(self._waiting) + len(self._swapped)
        return EngineView(pool.num_available, pool.num_blocks, self.kv.block_size, self._num_active, num_waiting)

    def _replace_policy(self) -> None:
        """The user's policy has failed: rank all requests by the default one, between steps."""
        self._policy = GuardedPolicy(PriorityPolicy())
        for request in self._requests.values():
            request.rank = self._policy.rank(request)
        for queue in (self._waiting, self._swapped, self._running):
            queue.sort(key=_rank)

    @property
    def _num_active(self) -> int:
        return len(self._running) + len(self._loading)

    def _finish(self, request: Request, keep_blocks: bool = False) -> None:
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.drafted = None  # callers keep their requests
        self._forget(request)
        if not keep_blocks:
            self.kv.release(request)

    def _queue_of(self, request: Request) -> list[Request]:
        return {
            RequestStatus.WAITING: self._waiting,
            RequestStatus.AWAITING: self._awaiting,
            RequestStatus.RUNNING: self._running,
            RequestStatus.SWAPPED: self._swapped,
        }[request.status]
