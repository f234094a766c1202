"""Learns the time of a step for each number of tokens, where a linear model does not fit. Pure: no clock.

CPU kernels compute tokens in tiles: a step of 9 takes nearly twice as long as one of 8, and as long as one of 16. The
linear model of `StepTimes` gives the growth with context and tiles; the excess over it is learned for each number of
tokens. On GPUs, whose decode steps mostly read the weights, the linear model alone is used.
"""

from __future__ import annotations

from collections import defaultdict

from common.step_times import FADE, FAR, StepCost, StepTimes

NEIGHBORS = {-1: 1 / 16, 0: 1.0, 1: 1 / 16}  # weights of a step for these distances of the number of tokens
PRIOR = 2.0  # weight of the linear model, in steps


class StepCosts:
    """Learns from measured steps that only decode."""

    def __init__(self, tile: int = 0) -> None:
        """tile: tokens that kernels are expected to compute together, at the cost of one, until measured steps tell
        more; 0: a linear model, which at first expects all numbers of tokens to cost the same.
        """
        self._times, self._tile = StepTimes(starts_flat=not tile), tile or 1
        self._weights: defaultdict[int, float] = defaultdict(float)
        self._excess: defaultdict[int, float] = defaultdict(float)  # weighted seconds beyond the linear model

    @property
    def line(self) -> StepCost:
        """The linear model, in tiles instead of rows."""
        return self._times.cost

    def observe(self, num_tokens: int, seconds: float, context: int) -> None:
        """Learn from a step."""
        self._times.observe(self._num_tiles(num_tokens), 0, seconds, context)
        expected = self._expected(num_tokens, context)
        if not expected or self._tile == 1:
            return
        excess = min(seconds, FAR * expected) - expected
        for distance, weight in NEIGHBORS.items():
            number, kept = num_tokens + distance, 1 - (1 - FADE) * weight
            self._weights[number] = kept * self._weights[number] + weight
            self._excess[number] = kept * self._excess[number] + weight * excess

    def seconds(self, num_tokens: int, context: int = 0) -> float:
        """Return seconds of a step. Before the first one: its number of tiles, or 0 without tiles."""
        if self._tile == 1:  # called for each possible draft of a step
            return self._times.cost.seconds(num_tokens, context=context)
        expected = self._expected(num_tokens, context)
        if not expected:
            return float(self._num_tiles(num_tokens))
        weight = self._weights.get(num_tokens, 0.0)
        if not weight:
            return expected
        return max(expected + self._excess[num_tokens] / (weight + PRIOR), 0.1 * expected)

    def _expected(self, num_tokens: int, context: int) -> float:
        return self._times.cost.seconds(self._num_tiles(num_tokens), context=context)

    def _num_tiles(self, num_tokens: int) -> int:
        return -(-num_tokens // self._tile)
