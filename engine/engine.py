"""One engine: scheduler and runner in a loop that reads `schedule -> run -> update`.

Used as it is by `engine.LLM` (in-process) and by a worker's rank (`worker/engine_process.py`). It does not know where
requests come from, what text is, or how KV reaches a load job's blocks.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from common.errors import InvalidRequestError
from engine.request import (
    Request,
    RequestId,
    RequestOutput,
    RequestStatus,
    SamplingParams,
    ScheduledRow,
    StepPlan,
    StepResult,
)
from engine.scheduler import Scheduler

logger = logging.getLogger(__name__)


class DeviceLostError(Exception):
    """Every call to the device fails from now on: only a new process helps. Ends the loop."""


class Runner(Protocol):
    """Executes plans. `engine.cpu.runner.ModelRunner` is the plain one; tests of the loop bring their own."""

    def run(self, plan: StepPlan) -> StepResult: ...


class OverlappedRunner(Runner, Protocol):
    """Can also start a step and give its result later, in the order of the launches."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Queue the step behind those launched before; the returned function waits for its result.

        When it raises, the plan's copies are done, and `run` may be called with the same rows.
        """
        ...

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        """Whether some row cannot be launched while tokens before it are pending (penalties count them)."""
        ...


@dataclass(frozen=True, slots=True)
class StepStats:
    """Size of the last step that did something."""

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


class Engine:
    """Requests in, one `RequestOutput` per request and step out."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        overlapped: OverlappedRunner | None = None,
    ) -> None:
        """With `overlapped` (usually the same object as `runner`), a step is planned while the one before runs."""
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.num_steps = 0
        self.num_failed_steps = 0  # steps that had to be repeated row by row
        self.last_step = StepStats()
        self.last_rows: list[ScheduledRow] = []
        self._runner = runner
        self._overlapped = overlapped
        self._in_flight: tuple[StepPlan, Callable[[], StepResult]] | None = None
        self._names = itertools.count()

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: RequestId | None = None,
        output_token_ids: Sequence[int] = (),
        priority: int = 0,
        cache_salt: str = "",
        prefill_only: bool = False,
        kv_source: object | None = None,
        num_source_tokens: int = 0,
    ) -> Request:
        """Check and enqueue a request. Raises InvalidRequestError, ContextLengthError."""
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt must hold at least one token", "prompt")
        self._check_token_ids(prompt_token_ids, params)
        self._check_in_vocabulary("the output", output_token_ids, None)  # not a field of a client's request
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        request = Request(
            request_id=request_id or RequestId(f"local-{next(self._names)}"),
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            output_token_ids=list(output_token_ids),
            num_replayed_tokens=len(output_token_ids),
            priority=priority,
            cache_salt=cache_salt,
            prefill_only=prefill_only,
            eos_token_ids=self.eos_token_ids,
            kv_source=kv_source,
            num_source_tokens=num_source_tokens,
        )
        if len(request.output_token_ids) >= params.max_tokens:
            # No `param`: clients do not send output tokens, so this is never their mistake.
            raise InvalidRequestError("all max_tokens are generated already")
        self.scheduler.add(request)
        return request

    def abort(self, request_id: RequestId) -> Request | None:
        """Forget a request; its blocks are free at once, or when a load that fills them has ended."""
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Run one step; empty when nothing could be scheduled. Overlapped: the outputs of the step before."""
        plan = self.scheduler.schedule()
        self.last_rows = plan.rows
        if not plan.is_empty:
            self._count(plan)
            self.scheduler.advance(plan)
        if self._overlapped is not None:
            return self._step_overlapped(plan, self._overlapped)
        return [] if plan.is_empty else self.scheduler.update(plan, self._run(plan))

    def _step_overlapped(self, plan: StepPlan, runner: OverlappedRunner) -> list[RequestOutput]:
        """Launch `plan`, then apply the step that was in flight. See docs/decisions/0002."""
        before, self._in_flight = self._in_flight, None
        outputs: list[RequestOutput] = []
        if before is not None and runner.needs_known_tokens(plan):
            outputs += self._finish_first(before, plan)
            before = None
        if not plan.is_empty:
            try:
                self._in_flight = (plan, runner.launch(plan))
            except DeviceLostError:
                raise
            except Exception:  # noqa: BLE001 - whatever it was, the rows that do not cause it go on
                self._note_failure(plan)
                if before is not None:
                    outputs += self._finish_first(before, plan)
                    before = None
                outputs += self.scheduler.update(plan, self._run_one_by_one(plan.rows))
        return outputs if before is None else outputs + self._finish(before)

    def _finish_first(self, step: tuple[StepPlan, Callable[[], StepResult]], plan: StepPlan) -> list[RequestOutput]:
        """Apply the step in flight before `plan` runs, which loses the rows of requests that ended with it."""
        outputs = self._finish(step)
        plan.rows = [row for row in plan.rows if row.request.status is RequestStatus.RUNNING]
        return outputs

    def _finish(self, step: tuple[StepPlan, Callable[[], StepResult]]) -> list[RequestOutput]:
        plan, result = step
        return self.scheduler.update(plan, result())

    def _count(self, plan: StepPlan) -> None:
        self.num_steps += 1
        num_decodes = sum(1 for row in plan.rows if row.num_new_tokens == 1)
        self.last_step = StepStats(plan.num_tokens - num_decodes, num_decodes)

    def _run(self, plan: StepPlan) -> StepResult:
        try:
            return self._runner.run(plan)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, the rows that do not cause it go on
            self._note_failure(plan)
            if len(plan.rows) == 1:
                return _failed(plan.rows, error)
            return self._run_one_by_one(plan.rows)

    def _note_failure(self, plan: StepPlan) -> None:
        """Inside of an exception's handler."""
        self.num_failed_steps += 1
        logger.exception("step of %d rows failed; running them one by one", len(plan.rows))

    def _run_one_by_one(self, rows: Sequence[ScheduledRow]) -> StepResult:
        """Find the rows that fail. Copies are done already; computing a row twice writes the same KV."""
        merged = StepResult([], [], [])
        for index, row in enumerate(rows):
            try:
                result = self._runner.run(StepPlan(rows=[row]))
            except DeviceLostError:
                raise
            except Exception as error:  # noqa: BLE001 - this row's request fails alone, internals not shown
                result = _failed([row], error)
            merged.token_ids += result.token_ids
            merged.logprobs += result.logprobs
            merged.prompt_logprobs += result.prompt_logprobs
            merged.errors.update((index, message) for message in result.errors.values())
        return merged

    def _check_token_ids(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        named = [
            ("prompt", prompt_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
            ("bad_words", [token_id for word in params.bad_words for token_id in word]),
        ]
        for param, token_ids in named:
            self._check_in_vocabulary(param, token_ids, param)

    def _check_in_vocabulary(self, what: str, token_ids: Sequence[int], param: str | None) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            raise InvalidRequestError(
                f"{what} holds a token id outside the vocabulary (0 to {self.vocab_size - 1})", param
            )


def _failed(rows: Sequence[ScheduledRow], error: Exception) -> StepResult:
    empty: StepResult = StepResult([[] for _ in rows], [[] for _ in rows], [[] for _ in rows])
    empty.errors = {
        index: f"the engine failed on this request ({type(error).__name__})" for index in range(len(rows))
    }
    return empty
