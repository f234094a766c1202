"""Sizes of prompt chunks next to decode rows that keep an objective for the time between tokens. Pure."""

from __future__ import annotations

import math

from common.step_times import StepCost

MIN_CHUNK_TOKENS = 64  # prompts advance by this many tokens in every step, whatever the objective
FLAT_CHUNK_TOKENS = 256  # smaller chunks hardly shorten a GPU's step: it reads all weights and may wait for the host
MOST_OF_OBJECTIVE = 0.5  # share that such a chunk may take: on slow devices and with large models every token counts


def tokens_in(cost: StepCost, work: float, start: float) -> float:
    """Return the prompt tokens after `start` others that take `work` seconds; 0 also if the cost is unknown."""
    per_token = cost.prompt_token + cost.prompt_context * start
    if work <= 0.0 or not per_token:
        return 0.0
    return 2 * work / (per_token + math.sqrt(per_token * per_token + 2 * cost.prompt_context * work))


def least_chunk_tokens(cost: StepCost, itl_objective: float) -> int:
    """Return the prompt tokens of a step in which decode rows leave no time for them. Their cost must be known."""
    flat = min(FLAT_CHUNK_TOKENS, MOST_OF_OBJECTIVE * itl_objective / cost.prompt_token)
    return max(int(flat), MIN_CHUNK_TOKENS)


def chunk_work(cost: StepCost, itl_objective: float, decode_seconds: float) -> float:
    """Return the seconds of prompt work that an objective leaves next to decode rows that take `decode_seconds`."""
    least = least_chunk_tokens(cost, itl_objective) * cost.prompt_token if cost.prompt_token else 0.0
    return max(itl_objective / cost.spread - decode_seconds - cost.prompt, least)
