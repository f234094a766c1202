"""Learns how long a worker's steps take, from measured steps. Pure: no clock.

    seconds = base + row * decode rows + context * tokens of KV that they read    of a step that only decodes
            + prompt + prompt_token * tokens + prompt_context * pairs             where it computes prompt tokens, too

`pairs` counts each prompt token once for every token before it, see `common/pairs.py`. `prompt` is the fixed cost of
a step with prompt tokens: on a GPU the host launches its kernels one by one, while decode steps are graphs. An engine
limits its prompt chunks by these costs, and a router predicts with them; each learns them itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FADE = 0.98  # weight of a step after the next one of its kind
INERTIA = 0.5  # weight of the old slopes, as variance of sizes (in means): they change slowly where sizes vary less
NUM_SKIPPED = 2  # first steps of each kind, which compile kernels
FAR = 4.0  # times the expectation: a longer step is an outlier; after one shorter by this, learning starts again
FEW_CONTEXT_TOKENS = 4096  # with fewer, outliers look like a cost of context, which many tokens would multiply
NOTHING = 1e-9  # rounding errors, as a share
MIN_PROMPT_TOKENS = 16  # with fewer, the time of a token cannot be told
SPREAD = 1.25  # before it is measured
WIDEST = 1.6  # a larger ratio is not spread but another cost
SPREAD_STEP = 0.02  # how much one longer step raises it
SPREAD_STEPS = 250  # after which it falls halfway to the longest of them: about one step in 500 is longer than it,
# since a 99th percentile of 100 gaps is their longest


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds for each part of a step; 0: not measured yet."""

    base: float = 0.0
    row: float = 0.0
    context: float = 0.0
    prompt: float = 0.0
    prompt_token: float = 0.0
    prompt_context: float = 0.0
    spread: float = SPREAD  # factor over the prediction that one in 500 steps with prompts and decode rows exceeds

    def seconds(
        self, num_rows: float, num_prompt_tokens: float = 0.0, context: float = 0.0, pairs: float = 0.0
    ) -> float:
        decode = self.base + self.row * num_rows + self.context * context if num_rows else 0.0
        return decode + self.prompt + self.work(num_prompt_tokens, pairs) if num_prompt_tokens else decode

    def work(self, num_prompt_tokens: float, pairs: float) -> float:
        """Return the seconds for the prompt tokens alone, however many steps they are spread over."""
        return self.prompt_token * num_prompt_tokens + self.prompt_context * pairs


class StepTimes:
    """Takes measured steps; `cost` is the estimate."""

    def __init__(self, starts_flat: bool = True) -> None:
        """starts_flat: rows are assumed to cost nothing until measured; otherwise each costs as much as the first."""
        self.cost = StepCost()
        self._decode = _Plane(starts_flat, few=FEW_CONTEXT_TOKENS)
        self._prompts = _Plane(starts_flat=False)
        self._spread = SPREAD
        self._longest, self._num_compared = 1.0, 0  # of the steps since the spread was last lowered

    def observe(
        self, num_rows: int, num_prompt_tokens: int, seconds: float, context: float = 0.0, pairs: float = 0.0
    ) -> None:
        """Learn from one step."""
        if not 0.0 < seconds < math.inf or not (num_rows or num_prompt_tokens):
            return
        if not num_prompt_tokens:
            self._decode.add(num_rows, context, seconds)
        elif num_prompt_tokens >= MIN_PROMPT_TOKENS:
            cost = self.cost
            if num_rows and cost.prompt_token and cost.base:
                self._widen(seconds / cost.seconds(num_rows, num_prompt_tokens, context, pairs))
            decode = cost.seconds(num_rows, context=context)
            if decode > seconds:  # if every step has prompts, only this corrects it
                self._decode.add(num_rows, context, seconds)
            decode = min(decode, 0.9 * seconds)
            self._prompts.add(num_prompt_tokens, pairs, seconds - decode, decode)
        self.cost = StepCost(*self._decode.parts, *self._prompts.parts, self._spread)

    def _widen(self, ratio: float) -> None:
        """Move the spread to where about one step in 500 exceeds it."""
        self._longest, self._num_compared = max(self._longest, ratio), self._num_compared + 1
        if ratio > self._spread:
            self._spread = min(self._spread + SPREAD_STEP, WIDEST)
        if self._num_compared == SPREAD_STEPS:
            self._spread = min(self._spread, (self._spread + self._longest) / 2)
            self._longest, self._num_compared = 1.0, 0


class _Plane:
    """base + a * x + b * z, fitted to points by relative error, with the most weight on the newest.

    No part is negative. Sizes that are nearly proportional or hardly vary cannot separate a from b, or either from
    the
    base: along such directions the slopes keep their old values.
    """

    def __init__(self, starts_flat: bool, few: float = 0.0) -> None:
        """starts_flat: the fit before points differ, flat or proportional to x. few: with less z, b learns little."""
        self._starts_flat, self._few = starts_flat, few
        self._num_added = 0
        self._reset()

    def _reset(self) -> None:
        self._n = self._x = self._z = self._y = 0.0
        self._xx = self._xz = self._zz = self._xy = self._zy = 0.0
        self._slopes: tuple[float, float] | None = None
        self.parts = (0.0, 0.0, 0.0)  # base, a, b

    def add(self, x: float, z: float, y: float, beside: float = 0.0) -> None:
        """Add a point. beside: time of the step outside of y. Errors are shares of the whole step: the few tokens at
        a prompt's end take almost no time in a step with decode rows, which reads the weights anyway, and tell
        little."""
        self._num_added += 1
        if self._num_added <= NUM_SKIPPED:
            return
        expected = y
        if self._n:
            base, a, b = self.parts
            expected = base + a * x + b * z
            if FAR * (beside + y) < beside + expected:
                self._reset()
                expected = y
            else:
                y = min(y, FAR * (beside + expected) - beside)
        weight = 1.0 / (beside + expected) ** 2
        self._n = FADE * self._n + weight
        self._x = FADE * self._x + weight * x
        self._y = FADE * self._y + weight * y
        self._xx = FADE * self._xx + weight * x * x
        self._xy = FADE * self._xy + weight * x * y
        if z or self._z:
            self._z = FADE * self._z + weight * z
            self._xz = FADE * self._xz + weight * x * z
            self._zz = FADE * self._zz + weight * z * z
            self._zy = FADE * self._zy + weight * z * y
        self._fit()

    def _fit(self) -> None:
        """Fit least squares with inertia, in units of the means of x, z and y."""
        n = self._n
        mean_x, mean_z, mean_y = self._x / n, self._z / n, self._y / n
        least_a = 0.0 if self._starts_flat else 0.2  # prompt tokens take time, whatever a few points say
        old_a, old_b = (0.0, 0.0) if self._starts_flat else (1.0, 0.0)
        if self._slopes is not None:
            old_a, old_b = self._slopes[0] * mean_x / mean_y, self._slopes[1] * mean_z / mean_y
        left_x = _covariance(self._xx, n, mean_x, mean_x) + INERTIA
        right_x = _covariance(self._xy, n, mean_x, mean_y) + INERTIA * old_a
        if not mean_z:  # contexts are not known
            a, b = min(max(right_x / left_x, least_a), 1.0), 0.0
            self._slopes = a * mean_y / mean_x, self._slopes[1] if self._slopes is not None else 0.0
        else:
            xz = _covariance(self._xz, n, mean_x, mean_z)
            inertia = INERTIA * max(self._few / mean_z, 1.0) ** 2
            left_z = _covariance(self._zz, n, mean_z, mean_z) + inertia
            right_z = _covariance(self._zy, n, mean_z, mean_y) + inertia * old_b
            determinant = left_x * left_z - xz * xz
            a = (right_x * left_z - right_z * xz) / determinant
            b = (right_z * left_x - right_x * xz) / determinant
            if b < 0.0:
                a, b = right_x / left_x, 0.0
            if a < least_a:
                a, b = least_a, max((right_z - least_a * xz) / left_z, 0.0)
            if a + b > 1.0:
                a, b = a / (a + b), b / (a + b)
            self._slopes = a * mean_y / mean_x, b * mean_y / mean_z
        base = 1.0 - a - b
        self.parts = (base * mean_y if base > NOTHING else 0.0), *self._slopes


def _covariance(sum_of_products: float, n: float, first: float, second: float) -> float:
    value = sum_of_products / n / (first * second) - 1.0
    return value if abs(value) > NOTHING else 0.0
