"""How long a worker's steps take, learned from steps that were measured. Pure: no clock.

    seconds = base + row * decode rows + prompt_token * prompt tokens

The first two come from steps that only decode, the third from those that compute prompts. An engine bounds its
prompt chunks by this, and a router predicts with it; both learn it for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

FADE = 0.98  # what a step that only decoded counts for after the next one
WEIGHT = 0.15  # of the newest step with prompt tokens
NUM_TRUSTED = 16  # steps after which one that takes far longer counts as an accident
FAR = 4.0
MIN_PROMPT_TOKENS = 16  # fewer measure overhead, not rate


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds for each part of a step; 0: not measured yet."""

    base: float = 0.0
    row: float = 0.0
    prompt_token: float = 0.0

    def seconds(self, num_rows: float, num_prompt_tokens: float = 0.0) -> float:
        return (self.base + self.row * num_rows if num_rows else 0.0) + self.prompt_token * num_prompt_tokens

    def prompt_tokens_within(self, seconds: float, num_rows: float) -> int:
        """Most prompt tokens in a step of so many decode rows that ends in time; 0 also when that is not known."""
        if not self.prompt_token:
            return 0
        return max(int((seconds - self.seconds(num_rows)) / self.prompt_token), 0)


class StepTimes:
    """Takes measured steps; `cost` is what they say."""

    def __init__(self) -> None:
        self.cost = StepCost()
        self._num_observed = 0
        # Faded sums over steps that only decoded, of 1, rows, seconds, rows * rows, rows * seconds.
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        if not 0.0 < seconds < float("inf") or not (num_rows or num_prompt_tokens):
            return
        expected = self.cost.seconds(num_rows, num_prompt_tokens)
        if expected > 0 and self._num_observed > NUM_TRUSTED:
            seconds = min(seconds, FAR * expected)
        self._num_observed += 1
        if not num_prompt_tokens:
            self._observe_decode(num_rows, seconds)
        elif num_prompt_tokens >= MIN_PROMPT_TOKENS:
            decode_seconds = self.cost.seconds(num_rows)
            measured = max(seconds - decode_seconds, 0.1 * seconds) / num_prompt_tokens
            old = self.cost.prompt_token
            new = measured if old == 0 else old + WEIGHT * (measured - old)
            self.cost = StepCost(self.cost.base, self.cost.row, new)

    def _observe_decode(self, num_rows: int, seconds: float) -> None:
        x, y = float(num_rows), seconds
        self._n = FADE * self._n + 1
        self._x = FADE * self._x + x
        self._y = FADE * self._y + y
        self._xx = FADE * self._xx + x * x
        self._xy = FADE * self._xy + x * y
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        slope = self.cost.row
        if variance > max(1.0, 0.01 * mean_x * mean_x):  # else the rows hardly differed: keep what is known
            slope = (self._xy / self._n - mean_x * mean_y) / variance
        slope = min(max(slope, 0.0), mean_y / max(mean_x, 1.0))
        self.cost = StepCost(mean_y - slope * mean_x, slope, self.cost.prompt_token)
