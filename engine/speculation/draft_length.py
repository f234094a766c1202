"""Chooses how many drafts of each row a step computes: those that are expected to make it faster. Pure: no clock.

The cost of a step is learned from this engine's steps (`step_costs.py`). A step yields one token per row and one per
accepted draft. The most probable drafts are taken first, up to the number with the most tokens per second, if that is
clearly more than without drafts. At a full batch, where time grows with every token, it is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.step_times import StepCost
from engine.plan import StepSize
from engine.speculation.step_costs import StepCosts

# Steps of several sizes are needed to learn the costs, which also change. So after this many steps with drafts comes
# one without, and after this many without one with the best row's drafts: first 4, then twice as many each time.
FIRST_TRIAL, STEPS_BETWEEN_TRIALS = 4, 200
WORTH_A_LOOK = 0.25  # of the break-even probability, if every draft adds the same time to a step
GAIN = 1.05  # required speedup over no drafts, since estimates are not exact and trials cost steps, too


class Costs(Protocol):
    """Step times in seconds."""

    def seconds(self, num_tokens: int, context: int) -> float: ...


def expected_to_pay(
    acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, costs: Costs, context: int
) -> tuple[list[int], float]:
    """Return the number of drafts for each entry, and tokens per second with them; 0 while the costs are unknown.

    acceptance: for each row with drafts, the probability that a draft is accepted if those before it are. num_rows:
    all decode rows of the step. context: tokens of KV that they read.
    """
    seconds, most = costs.seconds(num_rows, context), sum(map(len, acceptance))
    least = 0.0
    if seconds and most:  # skips most candidates of a large batch
        least = WORTH_A_LOOK * num_rows * (costs.seconds(num_rows + most, context) / seconds - 1.0) / most
    candidates: list[tuple[float, int, int]] = []
    for entry, row in enumerate(acceptance):
        probability = 1.0
        for position, accepted in enumerate(row):
            probability *= accepted
            if probability <= least and seconds:
                break
            candidates.append((-probability, entry, position))
    candidates.sort()
    del candidates[max_drafts:]
    count, speed = len(candidates), 0.0
    if seconds:
        tokens = float(num_rows)
        plain = tokens / seconds
        count, speed = 0, plain * GAIN
        for more, (negative, _, _) in enumerate(candidates, 1):
            tokens -= negative
            seconds = costs.seconds(num_rows + more, context)
            if tokens > speed * seconds:
                count, speed = more, tokens / seconds
        speed = speed if count else plain
    chosen = [0] * len(acceptance)
    for _, entry, position in candidates[:count]:
        chosen[entry] = position + 1
    return chosen, speed


class DraftLengths:
    """Chooses the number of drafts in each step by measured step times."""

    def __init__(self, is_adaptive: bool = True, tile: int = 0) -> None:
        """is_adaptive: if False, a step computes all drafts that fit. tile: see StepCosts."""
        self.is_adaptive = is_adaptive
        self._costs = StepCosts(tile)
        self._num_steps_alike, self._had_drafts = 0, False
        self._steps_to_trial = FIRST_TRIAL
        self._seconds_of_drafting = 0.0
        self._asked: tuple[Sequence[Sequence[float]], int, int, int] | None = None  # the latest since the last step
        self._answer: tuple[list[int], float] = [], 0.0

    @property
    def cost(self) -> StepCost:
        """The linear cost model of a step."""
        return self._costs.line

    def seconds(self, num_tokens: int) -> float:
        """See StepCosts."""
        return self._costs.seconds(num_tokens)

    def exclude(self, seconds: float) -> None:
        """Leave out seconds that the step to be observed next spent on drafting."""
        self._seconds_of_drafting += seconds

    def observe(self, size: StepSize, seconds: float) -> None:
        """Learn from a step, if it has only decode rows: the time of prompts says nothing about drafts."""
        seconds, self._seconds_of_drafting = seconds - self._seconds_of_drafting, 0.0
        self._asked = None
        if size.num_decode_tokens and not size.num_prompt_tokens:
            self._costs.observe(size.num_decode_tokens, seconds, size.context)

    def best_speed(
        self, acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, context: int
    ) -> float:
        """Return tokens per second with the drafts that pay, 0 while unknown; arguments as for `expected_to_pay`."""
        return self._expected(acceptance, num_rows, max_drafts, context)[1]

    def _expected(
        self, acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, context: int
    ) -> tuple[list[int], float]:
        """See expected_to_pay. Cached, since a step asks twice: whether drafts pay, and how many."""
        asked = acceptance, num_rows, max_drafts, context
        if asked != self._asked:
            self._asked, self._answer = asked, expected_to_pay(*asked[:3], self._costs, context)
        return self._answer

    def choose(
        self, acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, context: int
    ) -> list[int]:
        """See expected_to_pay."""
        if not self.is_adaptive:
            return [len(row) for row in acceptance]
        chosen, _ = self._expected(acceptance, num_rows, max_drafts, context)
        has_drafts = any(chosen)
        self._num_steps_alike = self._num_steps_alike + 1 if has_drafts == self._had_drafts else 1
        self._had_drafts = has_drafts
        if self._num_steps_alike <= self._steps_to_trial:
            return chosen
        self._num_steps_alike, self._steps_to_trial = 0, min(2 * self._steps_to_trial, STEPS_BETWEEN_TRIALS)
        others = [0] * len(chosen)
        if not has_drafts:
            best = max(range(len(acceptance)), key=lambda entry: acceptance[entry][0])
            others[best] = len(acceptance[best])
        return others
