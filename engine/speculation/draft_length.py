"""How many drafts of each row a step computes: those that are expected to make it faster. Pure: no clock.

What a step takes is learned from the steps of this engine (`step_costs.py`). It gives a token for each row and for
each draft that is accepted. So as many drafts are computed, the most probable ones first, as give the most tokens per
second, if that is clearly more than without. At a full batch, where time grows with every token, that is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.step_times import StepCost
from engine.plan import StepSize
from engine.speculation.step_costs import StepCosts

# Costs are known of steps that differ, and they change: after so many steps with drafts comes one without, and after
# so many without one with the best row's. At the start after four, then ever fewer.
FIRST_TRIAL, STEPS_BETWEEN_TRIALS = 4, 200
WORTH_A_LOOK = 0.25  # of the probability that pays where all drafts add the same to a step
GAIN = 1.05  # times as many tokens per second as without: estimates are not exact, and trials cost steps, too


class Costs(Protocol):
    """Seconds of steps."""

    def seconds(self, num_tokens: int, context: int) -> float: ...


def expected_to_pay(
    acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, costs: Costs, context: int
) -> tuple[list[int], float]:
    """Number of drafts for each entry, and tokens per second with them; 0 where costs are 0, not known.

    acceptance: for each row with drafts, the probability that a draft is accepted if those before it are. num_rows:
    all that decode in the step. context: tokens of KV that they read.
    """
    seconds, most = costs.seconds(num_rows, context), sum(map(len, acceptance))
    least = 0.0
    if seconds and most:  # most candidates of a large batch are not worth a look
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
    """Chooses the number of drafts in each step, from measured steps."""

    def __init__(self, is_adaptive: bool = True, tile: int = 0) -> None:
        """is_adaptive: else all drafts are computed for which a step has room. tile: see StepCosts."""
        self.is_adaptive = is_adaptive
        self._costs = StepCosts(tile)
        self._num_steps_alike, self._had_drafts = 0, False
        self._steps_to_trial = FIRST_TRIAL
        self._seconds_of_drafting = 0.0
        self._asked: tuple[Sequence[Sequence[float]], int, int, int] | None = None  # last, since the last step
        self._answer: tuple[list[int], float] = [], 0.0

    @property
    def cost(self) -> StepCost:
        """What a step takes by its parts."""
        return self._costs.line

    def seconds(self, num_tokens: int) -> float:
        """See StepCosts."""
        return self._costs.seconds(num_tokens)

    def exclude(self, seconds: float) -> None:
        """The step that has not been observed yet took so long for the drafts of the next one."""
        self._seconds_of_drafting += seconds

    def observe(self, size: StepSize, seconds: float) -> None:
        """Learn from a step: of decode rows alone, since prompts take what they take."""
        seconds, self._seconds_of_drafting = seconds - self._seconds_of_drafting, 0.0
        self._asked = None
        if size.num_decode_tokens and not size.num_prompt_tokens:
            self._costs.observe(size.num_decode_tokens, seconds, size.context)

    def best_speed(
        self, acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, context: int
    ) -> float:
        """Tokens per second with the drafts that pay, 0 while that is not known; arguments as `expected_to_pay`'s."""
        return self._expected(acceptance, num_rows, max_drafts, context)[1]

    def _expected(
        self, acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, context: int
    ) -> tuple[list[int], float]:
        """See expected_to_pay. A step asks twice: whether drafts pay, and for how many."""
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
