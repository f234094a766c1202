"""A runner over several ranks: every plan goes to the followers, then to this process's own shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.cpu.pool_attention import BatchAttention
from engine.engine import DeviceLostError
from engine.parallel.followers import Followers
from engine.plan import PendingStep, StepPlan, StepResult
from engine.start_progress import OnProgress, no_progress


class ParallelRunner:
    """Rank 0's runner with its followers.

    A step that fails on one rank leaves the others in the middle of a collective: any exception ends the group.
    """

    def __init__(self, local: Any, followers: Followers) -> None:
        """local: this rank's, for a CPU or a GPU."""
        self.local = local
        self.num_finished = 0  # steps
        self.max_steps_in_flight = local.max_steps_in_flight
        self._followers = followers

    def launch(self, plan: StepPlan) -> PendingStep:
        """See Runner. Raises DeviceLostError for whatever happens."""
        self._followers.send(plan, self.num_finished)
        try:
            return CountedStep(self.local.launch(plan), self)
        except Exception as error:  # whatever it was, no rank can tell where the others are
            self._followers.check()
            raise DeviceLostError(f"a step failed on rank 0 ({type(error).__name__})") from error

    def warmup(self, on_progress: OnProgress = no_progress) -> None:
        """Followers do the same when they are ready."""
        self.local.warmup(on_progress)
        self._followers.forget_store()

    def check(self) -> None:
        """See Runner."""
        self._followers.check()

    def watch_ranks(self, on_lost: Callable[[str], None]) -> None:
        """See Followers.watch."""
        self._followers.watch(on_lost)

    def wrap_attention(self, wrap: Callable[[BatchAttention], BatchAttention]) -> None:
        """See ModelRunner: rank 0's."""
        self.local.wrap_attention(wrap)

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        """See Runner."""
        needs: bool = self.local.needs_known_tokens(plan)
        return needs


@dataclass(frozen=True, slots=True)
class CountedStep:
    """Lets the next plan tell the followers that this step's result has been read."""

    pending: PendingStep
    runner: ParallelRunner

    def result(self) -> StepResult:
        """See PendingStep."""
        self.runner.num_finished += 1
        return self.pending.result()
