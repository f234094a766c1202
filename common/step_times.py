"""How long a worker's steps take, learned from steps that were measured. Pure: no clock.

    seconds = base + row * decode rows            of a step that only decodes
            + prompt + prompt_token * tokens      where it computes prompt tokens, too

`prompt` is what such a step takes however few the tokens are: on a GPU the host starts its kernels one by one where
decode steps are graphs. An engine bounds its prompt chunks by this, and a router predicts with it; both learn it for
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

FADE = 0.98  # what a step counts for after the next one of its kind
NUM_SKIPPED = 2  # steps of a kind at the start, which compile kernels
FAR = 4.0  # times what was expected: a longer step is an accident, after a shorter one all is learned anew
MIN_PROMPT_TOKENS = 16  # fewer tell nothing of the time of a token
MARGIN = 0.9  # of an objective: steps vary
GENTLE = 1.3  # times a step that only decodes: so much longer a step may be though no prompt is at risk
MIN_GENTLE_TOKENS = 16  # fewer are not worth a step that computes prompts
MIN_CHUNK_TOKENS = 64  # a prompt advances by so many in every step, whatever the objective says


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds for each part of a step; 0: not measured yet."""

    base: float = 0.0
    row: float = 0.0
    prompt: float = 0.0
    prompt_token: float = 0.0

    def seconds(self, num_rows: float, num_prompt_tokens: float = 0.0) -> float:
        decode = self.base + self.row * num_rows if num_rows else 0.0
        return decode + (self.prompt + self.prompt_token * num_prompt_tokens if num_prompt_tokens else 0.0)

    def prompt_tokens_within(self, seconds: float, num_rows: float) -> int:
        """Most prompt tokens in a step of so many decode rows that ends in time; 0 also when that is not known."""
        if not self.prompt_token:
            return 0
        return max(int((seconds - self.seconds(num_rows) - self.prompt) / self.prompt_token), 0)

    def prompt_tokens_at_rate(self, tokens_per_second: float, num_rows: float) -> float:
        """Fewest prompt tokens in each step that make so many a second; infinite when no step does."""
        busy_share = tokens_per_second * self.prompt_token
        if busy_share >= 1.0:
            return float("inf")
        return tokens_per_second * (self.seconds(num_rows) + self.prompt) / (1.0 - busy_share)


def chunk_bounds(cost: StepCost, itl_objective: float, num_rows: float) -> tuple[int, int]:
    """Prompt tokens beside so many decode rows: when no prompt is at risk, and at most.

    Where a step with any prompt tokens is long, it is to be as full as it may be: the two are equal.
    """
    most = max(cost.prompt_tokens_within(MARGIN * itl_objective, num_rows), MIN_CHUNK_TOKENS)
    gentle = cost.prompt_tokens_within(GENTLE * cost.seconds(num_rows), num_rows)
    return (most if gentle < MIN_GENTLE_TOKENS else min(gentle, most)), most


class StepTimes:
    """Takes measured steps; `cost` is what they say."""

    def __init__(self) -> None:
        self.cost = StepCost()
        self._decode = _Line(starts_flat=True)
        self._prompts = _Line(starts_flat=False)

    def observe(self, num_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        if not 0.0 < seconds < float("inf") or not (num_rows or num_prompt_tokens):
            return
        if not num_prompt_tokens:
            self._decode.add(num_rows, seconds)
        elif num_prompt_tokens >= MIN_PROMPT_TOKENS:
            self._prompts.add(num_prompt_tokens, max(seconds - self.cost.seconds(num_rows), 0.1 * seconds))
        self.cost = StepCost(*self._decode.base_and_slope(), *self._prompts.base_and_slope())


class _Line:
    """A line through points, the newest of which count most. Neither part is negative."""

    def __init__(self, starts_flat: bool) -> None:
        """starts_flat: what it is before points differ: flat, or through the origin."""
        self._starts_flat = starts_flat
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._slope: float | None = None
        self._num_added = 0

    def add(self, x: float, y: float) -> None:
        self._num_added += 1
        if self._num_added <= NUM_SKIPPED:
            return
        if self._n:
            expected = self._at(x)
            if FAR * y < expected:
                self._n = self._x = self._y = self._xx = self._xy = 0.0
                self._slope = None
            y = min(y, FAR * expected)
        self._n = FADE * self._n + 1.0
        self._x = FADE * self._x + x
        self._y = FADE * self._y + y
        self._xx = FADE * self._xx + x * x
        self._xy = FADE * self._xy + x * y

    def _at(self, x: float) -> float:
        base, slope = self.base_and_slope()
        return base + slope * x

    def base_and_slope(self) -> tuple[float, float]:
        if not self._n:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        if variance > max(1.0, 0.01 * mean_x * mean_x):
            self._slope = (self._xy / self._n - mean_x * mean_y) / variance
        steepest = mean_y / mean_x
        slope = self._slope if self._slope is not None else 0.0 if self._starts_flat else steepest
        slope = min(max(slope, 0.0 if self._starts_flat else 0.2 * steepest), steepest)
        return mean_y - slope * mean_x, slope
