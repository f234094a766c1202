"""The runner of a model over several ranks: sends every plan to the followers, and runs this process's shard.

Rank 0 belongs to the last pipeline stage. Its peers there sample the same tokens; ranks of earlier stages get the
sampled tokens with the next plan. There are as many steps in flight as stages, each of other requests: while this
stage runs one step, the others run the next ones (docs/decisions/tensor-parallelism.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from engine.engine import DeviceLostError
from engine.pipeline_parallel.remote_stage import RemoteStage
from engine.plan import PendingStep, StepPlan, StepResult
from engine.request import TokenId
from engine.tensor_parallel.followers import Followers
from engine.wings import OnProgress, no_progress


class ParallelRunner:
    """Runs steps on all ranks. Any exception ends the group, since a failing rank leaves the others waiting."""

    def __init__(
        self, local: Any, followers: Followers | RemoteStage, num_in_flight: int = 0, is_eager: bool = False
    ) -> None:
        """local: this rank's runner, for a CPU or a GPU.

        num_in_flight: steps of a pipeline that run at the same time; 0: no pipeline, `local` decides. is_eager:
        `local.launch` computes the step, so it waits for the earlier stages.
        """
        self.local = local
        self.needs_known_tokens, self.propose_with = local.needs_known_tokens, local.propose_with
        self.attention_backend: str = local.attention_backend
        self.max_steps_in_flight = num_in_flight or local.max_steps_in_flight
        self._followers = followers
        self._has_stages = num_in_flight > 0
        self._is_eager = is_eager
        self._queued: deque[ParallelStep] = deque()  # sent to followers, not begun on this rank
        self._num_finished = 0
        self._sampled: list[Sequence[Sequence[TokenId]]] = []  # of steps that ended since the last plan

    def launch(self, plan: StepPlan) -> ParallelStep:
        """See Runner. Raises DeviceLostError for any failure."""
        sampled, self._sampled = self._sampled, []
        self._followers.send(plan, self._num_finished, sampled)
        step = ParallelStep(plan, self)
        self._queued.append(step)
        if not self._is_eager:
            self.start_queued()
        return step

    def start_queued(self) -> None:
        """Launch this rank's part of the queued steps; if launching computes, all stages have then ended them."""
        while self._queued:
            self._start_next()

    def finish(self, step: ParallelStep) -> StepResult:
        """Wait until a step has ended, in launch order."""
        while step.pending is None:
            self._start_next()
        try:
            found = step.pending.result()
        except Exception as error:  # whatever it was, the other ranks' state is unknown
            raise self._lost(error) from error
        self._num_finished += 1
        if self._has_stages:
            self._sampled.append(found.token_ids)
        return found

    def _start_next(self) -> None:
        step = self._queued.popleft()
        try:
            step.pending = self.local.launch(step.plan)
        except Exception as error:  # as above
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> DeviceLostError:
        self._followers.check()
        if isinstance(error, DeviceLostError):
            return error
        return DeviceLostError(f"a step failed on rank 0 ({type(error).__name__})")

    def warmup(self, on_progress: OnProgress = no_progress) -> None:
        """Warm up; followers do the same when they are ready."""
        self.local.warmup(on_progress)
        self._followers.forget_store()

    def check(self) -> None:
        self._followers.check()

    def watch_ranks(self, on_lost: Callable[[str], None]) -> None:
        self._followers.watch(on_lost)

    def tell_of_work(self, on_work: Callable[[], None]) -> None:
        """See ModelRunner; also called while this rank waits for stages that compute."""
        self.local.tell_of_work(on_work)
        self._followers.on_work = on_work


class ParallelStep:
    """A step sent to followers. pending: this rank's part, once it has begun."""

    def __init__(self, plan: StepPlan, runner: ParallelRunner) -> None:
        self.plan = plan
        self.pending: PendingStep | None = None
        self._runner = runner

    def result(self) -> StepResult:
        return self._runner.finish(self)
