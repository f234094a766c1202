"""Prompt tokens beside decode rows: as few as bring every first token in time, as many as keep the time between
tokens, by measured steps. Pure: the engine says what time it is.

Prompts with slack so wait for streams, and streams give way, up to their objective, to prompts at risk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from common.step_times import StepTimes, chunk_bounds
from engine.config import EngineConfig

FIRST_TOKENS = 256  # before a step with prompt tokens was measured


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A prompt that is not computed yet, or not all of it."""

    num_tokens: int  # left
    due: float = inf  # when its first token is promised


class PromptBudget:
    """The scheduler asks it how many tokens of prompts a step takes; the engine tells it how long steps took."""

    def __init__(self, itl_objective_seconds: float) -> None:
        self._itl_objective = itl_objective_seconds
        self.times = StepTimes()
        self.now = time.monotonic()

    def num_tokens(self, num_decode_rows: int, prompts: Sequence[WaitingPrompt], most: int) -> int:
        """Prompt tokens in a step of so many decode rows, at most `most`.

        prompts: in the order of service.
        """
        if not num_decode_rows:
            return most
        cost = self.times.cost
        if not cost.prompt_token:
            return min(FIRST_TOKENS, most)
        gentle, bound = chunk_bounds(cost, self._itl_objective, num_decode_rows)
        if gentle < bound:
            needed = cost.prompt_tokens_at_rate(self._needed_rate(prompts), num_decode_rows)
            bound = int(min(max(gentle, needed), bound))
        return min(bound, most)

    def _needed_rate(self, prompts: Sequence[WaitingPrompt]) -> float:
        """Tokens a second that bring each first token in time; infinite when that is over."""
        rate, num_tokens = 0.0, 0
        for prompt in prompts:
            num_tokens += prompt.num_tokens
            if prompt.due <= self.now:
                return inf
            rate = max(rate, num_tokens / (prompt.due - self.now))
        return rate


def budget_for(config: EngineConfig) -> PromptBudget | None:
    """The budget for an engine's objectives; None without an ITL objective."""
    if not config.itl_objective_ms:
        return None
    return PromptBudget(config.itl_objective_ms / 1e3)
