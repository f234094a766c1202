"""How many drafts of each row a step computes: those that are expected to make it faster. Pure: no clock.

A step takes `base + row * tokens` seconds, learned from the steps of this engine, and gives a token for each row and
for each draft that is accepted. So a draft pays when the probability that it is accepted is above what it adds to the
step's time, as a share of the time that a token takes. At a full batch, where time grows with every token, none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from common.step_times import StepCost, StepTimes
from engine.plan import StepSize

# Costs are known of steps that differ, and they change: after so many steps with drafts comes one without, and after
# so many without one with the best row's. At the start after four, then ever fewer.
FIRST_TRIAL, STEPS_BETWEEN_TRIALS = 4, 200


def expected_to_pay(
    acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, cost: StepCost, context: int
) -> list[int]:
    """Number of drafts for each entry.

    acceptance: for each row with drafts, the probability that a draft is accepted if those before it are. num_rows:
    all that decode in the step. context: tokens of KV that they read.
    """
    chosen = [0] * len(acceptance)
    candidates: list[tuple[float, int, int]] = []
    seconds, tokens = cost.seconds(num_rows, context=context), float(num_rows)
    least = tokens * cost.row / seconds if seconds else 0.0  # drafts that pay only raise tokens per second
    for entry, row in enumerate(acceptance):
        probability = 1.0
        for position, accepted in enumerate(row):
            probability *= accepted
            if probability <= least:
                break
            candidates.append((-probability, entry, position))
    candidates.sort()
    for negative, entry, position in candidates[:max_drafts]:
        if seconds and -negative * seconds <= tokens * cost.row:
            break
        chosen[entry] = position + 1
        tokens -= negative
        seconds += cost.row
    return chosen


class DraftLengths:
    """Chooses the number of drafts in each step, from measured steps."""

    def __init__(self, is_adaptive: bool = True) -> None:
        """is_adaptive: else all drafts are computed for which a step has room."""
        self.is_adaptive = is_adaptive
        self._times = StepTimes()
        self._num_steps_alike, self._had_drafts = 0, False
        self._steps_to_trial = FIRST_TRIAL
        self._seconds_of_drafting = 0.0

    @property
    def cost(self) -> StepCost:
        return self._times.cost

    def exclude(self, seconds: float) -> None:
        """The step that has not been observed yet took so long for the drafts of the next one."""
        self._seconds_of_drafting += seconds

    def observe(self, size: StepSize, seconds: float) -> None:
        """Learn from a step: of decode rows alone, since prompts take what they take."""
        seconds, self._seconds_of_drafting = seconds - self._seconds_of_drafting, 0.0
        if size.num_decode_tokens and not size.num_prompt_tokens:
            self._times.observe(size.num_decode_tokens, 0, seconds, size.context)

    def best_speed(
        self, acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, context: int
    ) -> float:
        """Tokens per second with the drafts that pay, 0 while that is not known; arguments as `expected_to_pay`'s."""
        cost = self._times.cost
        chosen = expected_to_pay(acceptance, num_rows, max_drafts, cost, context)
        tokens = num_rows + sum(
            sum(accumulate(row[:count], mul)) for row, count in zip(acceptance, chosen, strict=True)
        )
        seconds = cost.seconds(num_rows + sum(chosen), context=context)
        return tokens / seconds if seconds else 0.0

    def choose(
        self, acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, context: int
    ) -> list[int]:
        """See expected_to_pay."""
        if not self.is_adaptive:
            return [len(row) for row in acceptance]
        chosen = expected_to_pay(acceptance, num_rows, max_drafts, self._times.cost, context)
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
