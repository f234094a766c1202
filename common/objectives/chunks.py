"""Chunks of prompts beside decode rows that keep an objective for the time between tokens. Pure."""

from __future__ import annotations

import math

from common.step_times import StepCost

MIN_CHUNK_TOKENS = 64  # prompts advance by so many in every step, whatever the objective says
FLAT_CHUNK_TOKENS = 256  # fewer hardly shorten a GPU's step, which reads all weights and may wait for the host
MOST_OF_OBJECTIVE = 0.5  # that such a chunk may take: on slow devices and with large models each token counts


def tokens_in(cost: StepCost, work: float, start: float) -> float:
    """Prompt tokens after `start` others that take so many seconds of work; 0 also when that is not known."""
    per_token = cost.prompt_token + cost.prompt_context * start
    if work <= 0.0 or not per_token:
        return 0.0
    return 2 * work / (per_token + math.sqrt(per_token * per_token + 2 * cost.prompt_context * work))


def least_chunk_tokens(cost: StepCost, itl_objective: float) -> int:
    """Prompt tokens that a step takes even when decode rows leave no time for them; their cost is known."""
    flat = min(FLAT_CHUNK_TOKENS, MOST_OF_OBJECTIVE * itl_objective / cost.prompt_token)
    return max(int(flat), MIN_CHUNK_TOKENS)


def chunk_work(cost: StepCost, itl_objective: float, decode_seconds: float) -> float:
    """Seconds of prompts' work that an objective leaves beside decode rows which take so long."""
    least = least_chunk_tokens(cost, itl_objective) * cost.prompt_token if cost.prompt_token else 0.0
    return max(itl_objective / cost.spread - decode_seconds - cost.prompt, least)
