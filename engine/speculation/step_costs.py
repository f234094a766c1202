"""What a step costs for each number of tokens, where a line does not say it. Pure: no clock.

Kernels of CPUs take tokens in tiles: a step of 9 takes nearly twice as long as one of 8, and as long as one of 16.
The line of `StepTimes` says how time grows with context and with tiles. What steps of a number of tokens take beyond
it is learned apart. On GPUs, whose decode steps mostly read the weights, the line alone is used.
"""

from __future__ import annotations

from collections import defaultdict

from common.step_times import FADE, FAR, StepCost, StepTimes

NEIGHBORS = {-1: 1 / 16, 0: 1.0, 1: 1 / 16}  # what a step counts for these numbers of tokens
PRIOR = 2.0  # steps that the line counts for


class StepCosts:
    """Takes measured steps that only decode."""

    def __init__(self, tile: int = 0) -> None:
        """tile: tokens that kernels are expected to compute together, each tile at the cost of the first, until steps
        say more; 0: a line, of which any number of tokens is expected to cost the same.
        """
        self._times, self._tile = StepTimes(starts_flat=not tile), tile or 1
        self._weights: defaultdict[int, float] = defaultdict(float)
        self._excess: defaultdict[int, float] = defaultdict(float)  # seconds beyond the line, weighted

    @property
    def line(self) -> StepCost:
        """In tiles instead of rows."""
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
        """Seconds of a step with so many tokens. Before the first step: its tiles, to compare, or 0 without tiles."""
        if self._tile == 1:  # asked for each draft that a step may have
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
