"""Continuous batching: decides how many tokens each request computes in the next step, and which is preempted.

There are no phases: a request has `num_tokens` tokens and `num_computed_tokens` of them in the KV cache, and a step
closes part of that gap. A prompt, a prompt chunk, a decode token and a recompute after preemption are the same case.
Pure Python on plain data: no torch, no clock, no I/O. The loop around it is `schedule -> run -> update`. `order`
ranks requests, `admission` starts and preempts them, and `stopping` decides when one has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.errors import ContextLengthError
from common.wings import call_wing, from_wing
from engine.kv.manager import KVManager
from engine.plan import StepResult
from engine.request import FinishReason, Request, RequestId, RequestOutput, RequestStatus, SchedulerLoad
from engine.scheduled_step import PromptChunk, ScheduledStep, StepOutcome
from engine.scheduling.admission import Admission, RowTokens
from engine.scheduling.order import ServiceOrder
from engine.scheduling.remote_kv import RemoteKv
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.stopping import append_tokens, is_full

if TYPE_CHECKING:
    from engine.objectives.prompt_budget import PromptBudget
    from engine.speculation.drafts import Speculation


class Scheduler:
    """Owns all requests of one engine from `add` to the output that ends them."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        order: ServiceOrder | None = None,
        speculation: Speculation | None = None,
        prompt_budget: PromptBudget | None = None,
        num_stages: int = 1,
        row_tokens: RowTokens = Request.num_row_tokens,
        cuts_prompts: bool = True,
    ) -> None:
        """num_stages: of a pipeline; decode requests are divided among as many steps in flight. order: None: by
        priority. row_tokens: see `Request.num_row_tokens`. cuts_prompts: see `Admission`."""
        self.kv = kv
        self._row_tokens = row_tokens
        self.num_stages = num_stages
        self.prompt_budget = prompt_budget
        self.speculation = speculation
        longest = kv.longest
        self.max_model_len = max_model_len if longest is None else min(max_model_len, longest)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._order: ServiceOrder = order or call_wing("engine.priorities.order:PriorityOrder") or ServiceOrder()
        self._queues = RequestQueues()
        kind_of_kv: type[RemoteKv] = from_wing("engine.progressive_pulls.remote_kv:ProgressiveRemoteKv") or RemoteKv
        self.remote_kv = kind_of_kv(self._queues, kv)
        kind: type[Admission] = from_wing("engine.priorities.displacement:Displacement") or Admission
        self._admission = kind(self._queues, kv, self._order, self.remote_kv, max_num_seqs, row_tokens, cuts_prompts)
        self._num_arrived = 0

    # -- requests come and go --------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Accept a request. Raises ContextLengthError if it can never fit."""
        if request.num_tokens >= self.max_model_len:
            raise ContextLengthError(
                self.max_model_len,
                f"your prompt has {request.num_tokens} tokens, and its output has to fit, too",
                "prompt",
            )
        assert request.request_id not in self._queues.by_id
        request.arrival = self._num_arrived
        self._num_arrived += 1
        request.rank = self._order.rank(request)
        request.max_output = min(request.params.max_tokens, self.max_model_len - request.num_prompt_tokens)
        is_coming = self.remote_kv.awaits_prefetch(request)
        self._queues.enter(request, RequestStatus.AWAITING if is_coming else RequestStatus.WAITING)

    def abort(self, request_id: RequestId) -> Request | None:
        """Forget a request and free its blocks. Returns None if there is no such request (any more)."""
        request = self._queues.by_id.get(request_id)
        if request is None or self.remote_kv.is_cancelled(request):
            return None
        if request.status is RequestStatus.LOADING:
            self.remote_kv.cancel_load(request)
        else:
            self._finish(request)
        return request

    def hand_over(self, request_id: RequestId) -> None:
        """End a request with PREFILLED at its next token. Does nothing if there is no such request (any more)."""
        request = self._queues.by_id.get(request_id)
        if request is not None:
            request.prefill_only = True

    def has_work(self) -> bool:
        """Whether `schedule` can make progress now (a load in flight is not work)."""
        return bool(self._queues.waiting or self._queues.running or self._queues.swapped)

    def load(self) -> SchedulerLoad:
        return self._queues.load(self._admission.num_preemptions)

    # -- one step --------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        """Plan the next step: decode rows first, then prompt chunks, each in the order of service."""
        if self._order.take_change():
            self._queues.rank_anew(self._order.rank)
        step = ScheduledStep()
        decodes, prefills = self._running()
        budget = self._max_num_batched_tokens
        if self.prompt_budget is not None:  # fewer prompt tokens keep the step short for its decode rows
            budget -= self.prompt_budget.num_to_withhold(decodes, prefills, self._queues.waiting, budget)
        preempted = self._schedule_running(step, decodes, prefills, budget)
        if not preempted and (self._queues.waiting or self._queues.swapped):
            self._admission.admit(step, max(budget - step.num_tokens, 0))
        if self.speculation is not None:
            num_spare_tokens = self._max_num_batched_tokens - step.num_tokens
            # Blocks for the next token of each of the other requests.
            num_kept_blocks = (len(self._queues.running) - 1) * self.kv.blocks_per_position
            self.speculation.add_drafts(step, self.kv, num_spare_tokens, num_kept_blocks)
        self.remote_kv.reserve_prefetches()
        self.kv.offload_evicted(step)
        if not step.is_empty:
            step.seal(self._queues.take_forgotten())
        return step

    def advance(self, step: ScheduledStep) -> None:
        """Count the tokens of `step` as computed, and the most tokens that its rows can sample as pending.

        The next `schedule` may then be called before the step has ended.
        """
        for request, row in step.rows.items():
            request.num_computed_tokens = row.start + row.num_tokens
            request.num_pending_tokens += row.samples + len(row.draft_token_ids)
        self.kv.launched(step)

    def update(self, step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        """Apply the result of a step, and add its outputs to `outcome`."""
        self._end(step)
        self.kv.finish_copies(step)
        outputs, errors = outcome.outputs, result.errors
        for index, (request, row) in enumerate(step.rows.items()):
            request.num_pending_tokens -= row.samples + len(row.draft_token_ids)
            status = request.status
            if status is RequestStatus.FINISHED:
                continue  # aborted, or ended by an earlier step, while this step ran
            if errors and index in errors:
                self._finish(request)
                outputs.append(RequestOutput(request, [], error=errors[index]))
                continue
            if status is RequestStatus.RUNNING:  # else it was preempted while the step ran
                self.kv.publish(request)
                if request.prefill_only and not row.samples:
                    outcome.prompt_chunks.append(PromptChunk(request, row.stop))
            if result.prompt_logprobs[index] and not request.output_token_ids:
                num_missing = row.start - len(request.prompt_logprobs)  # negative: known from before a preemption
                if num_missing <= 0:
                    request.prompt_logprobs.extend(result.prompt_logprobs[index][-num_missing:])
            if row.samples:
                request.drafts = result.drafts.get(index)
                output = append_tokens(request, result, index)
                if self.speculation is not None and row.draft_token_ids:
                    self.speculation.settle(request, row, len(result.token_ids[index]), self.kv)
                if output.finish_reason is not None:
                    is_running = request.status is RequestStatus.RUNNING  # else its blocks are freed or swapped
                    is_prefilled = output.finish_reason is FinishReason.PREFILLED
                    self._finish(request, keep_blocks=is_running and is_prefilled)
                outputs.append(output)

    def drop_lost_steps(self, in_flight: Sequence[ScheduledStep]) -> None:
        """Count all steps as ended except `in_flight`, because the others will never be applied."""
        for step in [step for step in self.kv.in_flight if step not in in_flight]:
            self._end(step)

    def _end(self, step: ScheduledStep) -> None:
        self.kv.in_flight.remove(step)
        for request in step.ended:
            self.kv.release(request)

    # -- inside a step ---------------------------------------------------------------------------------------

    def _running(self) -> tuple[list[Request], list[Request]]:
        """Return the running requests that decode in the next step, and those with more than one token to compute."""
        decodes, prefills = [], []
        for request in self._queues.running:
            if request.is_held:
                continue
            num_left = request.num_uncomputed_tokens
            if num_left > 1:
                prefills.append(request)
            elif num_left == 1 and not is_full(request):
                decodes.append(request)
        return self._share_of(decodes) if self.num_stages > 1 else decodes, prefills

    def _share_of(self, decodes: list[Request]) -> list[Request]:
        """Select the requests of a pipeline's next step: an equal share, among those whose last token is known.

        The shares of all steps in flight cover all requests, so each is in one step of each round.
        """
        share = -(-len(decodes) // self.num_stages)
        return [request for request in decodes if not request.num_pending_tokens][:share]

    def _schedule_running(
        self, step: ScheduledStep, decodes: list[Request], prefills: list[Request], budget: int
    ) -> bool:
        """Add rows for these requests, of `budget` tokens in total. Returns whether a request was preempted."""
        preempted, num_decodes = False, len(decodes)
        for number, request in enumerate(decodes + prefills):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by an earlier request of this loop
            is_decode = number < num_decodes
            num_new = 1 if is_decode else self._row_tokens(request, budget)
            while not self.kv.grow(request, request.num_computed_tokens + num_new):
                victim = self._queues.running[-1]
                budget += self._admission.preempt(victim, step)
                preempted = True
                if victim is request:
                    break
            if request.status is RequestStatus.RUNNING:
                step.add_row(request, num_new, is_decode)
                budget -= num_new
        return preempted

    def _finish(self, request: Request, keep_blocks: bool = False) -> None:
        self._queues.remove(request)
        if keep_blocks:
            return
        for step in reversed(self.kv.in_flight):
            if request in step.rows:  # the step still writes to its blocks: a load must not get them earlier
                step.ended.append(request)
                return
        self.kv.release(request)
