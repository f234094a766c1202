"""One engine: scheduler and runner in a loop that reads `schedule -> run -> update`.

Used by `mini_infer.LLM` (in-process) and by a worker's engine process (`worker/engine_process/process.py`). Knows
neither the source of requests nor text, nor how KV reaches the blocks of a load.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from common.errors import InvalidRequestError
from engine.plan import PendingStep, ScheduledRow, StepPlan, StepResult, StepSize
from engine.request import Request, RequestId, SamplingParams, SchedulerLoad
from engine.request_checks import check_request
from engine.scheduled_step import KvLoad, ScheduledStep, StepOutcome, StepStats
from engine.scheduling.scheduler import Scheduler
from engine.wings import Adapters, Counting, Figures, Prepare

logger = logging.getLogger(__name__)


class DeviceLostError(Exception):
    """Every further call to the device fails, so only a new process helps. Ends the loop."""


class Runner(Protocol):
    """Executes plans, each of which continues the previous ones."""

    @property
    def max_steps_in_flight(self) -> int:
        """With 1, the result of a step is awaited before the next step is planned."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start the next step.

        If this raises, the plan's requests and copies have been processed, and its rows may be launched again.
        """
        ...

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        """Whether some row cannot be launched while its earlier tokens are pending (penalties count them)."""
        ...

    def check(self) -> None:
        """Raise DeviceLostError if the device, or a rank, is known to be lost."""
        ...


class Engine:
    """Takes requests and returns one `StepOutcome` per step.

    kv: the block bookkeeping, which leases need, too. remote_kv: the KV pulled from peers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        preparing: Sequence[Prepare] = (),
        counting: Sequence[Counting] = (),
        adapters: Adapters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """preparing: called in order with each new request. counting: sources of `figures`. clock: in seconds."""
        self.kv, self.remote_kv = scheduler.kv, scheduler.remote_kv
        self.max_model_len = scheduler.max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.num_steps = 0  # launched
        self.num_failed_steps = 0  # steps that had to be repeated row by row
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._preparing = preparing
        self._adapters = adapters
        if adapters is not None:
            adapters.tell_of_changes(scheduler.kv.prefixes.announce_adapter)
        self.counting = counting
        self._in_flight: deque[tuple[ScheduledStep, PendingStep, float]] = deque()  # with the time of launch
        self._learners = [each for each in (scheduler.prompt_budget, scheduler.speculation) if each is not None]
        self._last_end = 0.0
        self._names = itertools.count()

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: RequestId | None = None,
        output_token_ids: Sequence[int] = (),
        **fields: Any,
    ) -> Request:
        """Make a request and submit it. fields: further fields of `Request`, by name."""
        name = request_id or RequestId(f"local-{next(self._names)}")
        request = Request(name, list(prompt_token_ids), params, list(output_token_ids), **fields)
        self.submit(request)
        return request

    def submit(self, request: Request) -> None:
        """Check and enqueue a new request. Raises InvalidRequestError, ContextLengthError."""
        check_request(request, self.vocab_size)
        if request.params.seed is None:
            request.params = replace(request.params, seed=secrets.randbits(63), seed_is_drawn=True)
        request.eos_token_ids = self.eos_token_ids
        if request.adapter and self._adapters is None:
            raise InvalidRequestError("the workers of this model serve no adapters (--enable-lora)", "model")
        for prepare in self._preparing:
            prepare(request)
        self._scheduler.add(request)

    def abort(self, request_id: RequestId) -> Request | None:
        """Forget a request. Its blocks are freed at once, or when the load that fills them has ended."""
        return self._scheduler.abort(request_id)

    def hand_over(self, request_id: RequestId) -> None:
        """End a request with PREFILLED at its next token, whatever its status is."""
        self._scheduler.hand_over(request_id)

    def finish_load(self, load: KvLoad, ok: bool) -> None:
        """Report that a load of some step's outcome has ended. Called between steps."""
        self.remote_kv.finish(load, ok)

    def load(self) -> SchedulerLoad:
        return self._scheduler.load()

    def figures(self) -> Figures:
        """Return the metrics that wings count."""
        return {name: values for each in self.counting for name, values in each.figures().items()}

    def has_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_work()

    def check(self) -> None:
        """Raise DeviceLostError if no further step can run. Called between steps."""
        self._runner.check()

    def step(self, start_loads: Callable[[Sequence[KvLoad]], None] | None = None) -> StepOutcome:
        """Plan and launch a step, and apply the oldest step in flight once the limit is reached.

        With more than one step in flight, a step is planned while the previous one runs
        (docs/decisions/steps-and-plans.md). start_loads: called before the launch with the loads into blocks that no
        step in flight uses, so that they end before the next step is planned. Not called with speculation.
        """
        try:
            return self._step(start_loads)
        except BaseException:  # e.g. Ctrl-C: the interrupted step never ends, and requests would wait for it
            self._scheduler.drop_lost_steps([step for step, *_ in self._in_flight])
            raise

    def _step(self, start_loads: Callable[[Sequence[KvLoad]], None] | None) -> StepOutcome:
        step = self._scheduler.schedule()
        outcome = StepOutcome(step.plan, loads=self.remote_kv.take_loads())
        if start_loads is not None and outcome.loads and self._scheduler.speculation is None:
            loads, outcome.loads = outcome.loads, []
            free: list[KvLoad] = []
            for load in loads:
                (outcome.loads if self.kv.is_used(load.block_ids, step) else free).append(load)
            start_loads(free)
        if step.is_empty:
            if self._in_flight:
                self._finish_oldest(outcome)
        else:
            self.num_steps += 1
            self._scheduler.advance(step)
            if self._in_flight and self._runner.needs_known_tokens(step.plan):
                self._finish_all(step, outcome)
            self._launch(step, outcome)
            while len(self._in_flight) >= self._max_in_flight():
                self._finish_oldest(outcome)
        return outcome

    def _max_in_flight(self) -> int:
        speculation, is_pipeline = self._scheduler.speculation, self._scheduler.num_stages > 1
        waits = speculation is not None and not is_pipeline and speculation.needs_known_tokens
        return 1 if waits else self._runner.max_steps_in_flight

    def _launch(self, step: ScheduledStep, outcome: StepOutcome) -> None:
        """Launch the step. If that fails, apply all steps in flight, then run its rows one by one."""
        began = self._clock()
        try:
            self._in_flight.append((step, self._runner.launch(step.plan), began))
        except DeviceLostError:
            raise
        except Exception:  # any failure: rows that do not cause it must go on
            self.num_failed_steps += 1
            logger.exception("step of %d rows failed; running them one by one", len(step.rows))
            self._finish_all(step, outcome)
            result = self._run_one_by_one(step.plan.rows)
            outcome.stats = self._stats_of(step.plan, began)
            self._scheduler.update(step, result, outcome)

    def _finish_oldest(self, outcome: StepOutcome) -> None:
        step, pending, began = self._in_flight.popleft()
        result = pending.result()
        outcome.stats = self._stats_of(step.plan, began, result.seconds)
        self._scheduler.update(step, result, outcome)

    def _finish_all(self, step: ScheduledStep, outcome: StepOutcome) -> None:
        """Apply all steps in flight before `step` runs, and drop its rows of requests that have ended with them."""
        while self._in_flight:
            self._finish_oldest(outcome)
        step.drop_ended()

    def _run_one_by_one(self, rows: Sequence[ScheduledRow]) -> StepResult:
        """Run each row alone and without drafts, so that only rows that fail by themselves get an error.

        Computing a row again writes the same KV, and the runner knows its blocks already.
        """
        merged = StepResult.of_rows(len(rows))
        for index, row in enumerate(rows):
            num_known = row.num_tokens - len(row.draft_token_ids)
            alone = ScheduledRow(row.request_id, row.start, num_known, row.samples)
            try:
                result = self._runner.launch(StepPlan(rows=[alone])).result()
            except DeviceLostError:
                raise
            except Exception as error:  # noqa: BLE001 - only this row's request fails; internals are not shown
                result = StepResult.of_rows(1)
                result.errors = {0: f"the engine failed on this request ({type(error).__name__})"}
            merged.put([index], result)
        return merged

    def _stats_of(self, plan: StepPlan, began: float, on_device: float = 0.0) -> StepStats:
        """Measure a step. on_device: seconds by the device's clock, 0 if unknown. They are preferred because the host
        may notice the end of a step late, and would then count a part of the next step.
        """
        now, began = self._clock(), max(began, self._last_end)
        seconds, size = on_device or now - began, StepSize.of(plan.rows)
        self._last_end = min(began + seconds, now)
        is_like_others = plan.placed is None  # else it includes an exchange of experts between ranks
        if is_like_others:
            for learner in self._learners:
                learner.observe(size, seconds)
        return StepStats(size, seconds)
