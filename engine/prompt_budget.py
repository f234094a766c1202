"""Prompt tokens beside decode rows: as many as keep the time between tokens, learned from measured steps. Pure."""

from __future__ import annotations

from common.step_times import StepTimes

MARGIN = 0.9  # of the objective: steps vary
MIN_TOKENS = 64  # a prompt advances in every step, whatever the objective says
FIRST_TOKENS = 256  # before a step with prompt tokens was measured


class PromptBudget:
    """The scheduler asks it how many tokens of prompts a step takes; the engine tells it how long steps took."""

    def __init__(self, itl_objective_seconds: float) -> None:
        self._seconds = MARGIN * itl_objective_seconds
        self.times = StepTimes()

    def num_tokens(self, num_decode_rows: int, most: int) -> int:
        """Prompt tokens in a step of so many decode rows, at most `most`."""
        if not num_decode_rows:
            return most
        cost = self.times.cost
        within = cost.prompt_tokens_within(self._seconds, num_decode_rows) if cost.prompt_token else FIRST_TOKENS
        return min(max(within, MIN_TOKENS), most)
