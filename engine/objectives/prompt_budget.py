"""Prompt tokens beside decode rows: as many as keep the time between tokens, by measured steps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.objectives.chunks import chunk_work, least_chunk_tokens, tokens_in
from common.pairs import num_pairs
from common.step_times import StepCost, StepTimes
from engine.config import EngineConfig
from engine.objectives.settings import ObjectiveSettings
from engine.plan import StepSize
from engine.request import Request
from engine.wings import Figures

MOST_RATIOS = 64  # kept: an engine without a worker is not asked
FIRST_TOKENS = 256  # before a step with prompt tokens was measured


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A prompt that is not computed yet, or not all of it."""

    num_tokens: int  # left
    start: int = 0  # tokens before those


class PromptBudget:
    """The scheduler asks it how many tokens of prompts a step takes; the engine tells it how long steps took."""

    def __init__(self, itl_objective_seconds: float) -> None:
        self._itl_objective = itl_objective_seconds
        self.times = StepTimes()
        self._ratios = deque[float](maxlen=MOST_RATIOS)  # of durations and predictions, since they were asked for

    def observe(self, size: StepSize, seconds: float) -> None:
        """Learn from a step, and compare it with what was predicted for one with prompts beside decode rows."""
        rows, prompts, cost = size.num_decode_tokens, size.num_prompt_tokens, self.times.cost
        if cost.base and cost.prompt_token and rows and prompts:
            self._ratios.append(seconds / cost.seconds(rows, prompts, size.context, size.pairs))
        self.times.observe(rows, prompts, seconds, size.context, size.pairs)

    def figures(self) -> Figures:
        """See Counting."""
        ratios = list(self._ratios)
        self._ratios.clear()
        return {"mini_infer_step_seconds_over_predicted": ratios}

    def num_to_withhold(
        self, decodes: Sequence[Request], prefills: Sequence[Request], waiting: Sequence[Request], num_tokens: int
    ) -> int:
        """Tokens that prompts must leave unused of the step's `num_tokens` for the sake of these decode rows.

        prefills: prompts that have begun, in their order. waiting: those that may follow, if no peer has their KV.
        """
        room = num_tokens - len(decodes)
        if not (prefills or waiting):
            return 0
        streams = [r for r in decodes if r.output_token_ids or r.num_pending_tokens]  # the rest are prompts
        if not streams or room <= 0:
            return 0
        prompts = [*prefills, *(r for r in waiting if r.kv_source is None)]
        views = [WaitingPrompt(r.num_uncomputed_tokens, r.num_computed_tokens) for r in prompts]
        return room - self.num_tokens(len(streams), sum(r.num_tokens for r in streams), views, room)

    def num_tokens(self, num_decode_rows: int, context: int, prompts: Sequence[WaitingPrompt], most: int) -> int:
        """Prompt tokens in a step of so many decode rows, at most `most`.

        context: tokens of KV that these rows read. prompts: in the order of service.
        """
        if not num_decode_rows:
            return most
        cost = self.times.cost
        if not cost.prompt_token:
            return min(FIRST_TOKENS, most)
        work = chunk_work(cost, self._itl_objective, cost.seconds(num_decode_rows, context=context))
        return min(max(_tokens_in(cost, work, prompts, least_chunk_tokens(cost, self._itl_objective)), 1), most)


def _tokens_in(cost: StepCost, work: float, prompts: Sequence[WaitingPrompt], least: int) -> int:
    """Tokens of these prompts, one after the other, that so many seconds of work suffice for; not below `least`."""
    num_tokens = 0
    for prompt in prompts:
        own_work = cost.work(prompt.num_tokens, num_pairs(prompt.start, prompt.num_tokens))
        if own_work > work:
            return max(num_tokens + int(tokens_in(cost, work, prompt.start)), least)
        num_tokens += prompt.num_tokens
        work -= own_work
    return num_tokens


def budget_for(config: EngineConfig) -> PromptBudget | None:
    """None without an objective."""
    milliseconds = config.of(ObjectiveSettings).itl_objective_ms
    return PromptBudget(milliseconds / 1e3) if milliseconds else None
