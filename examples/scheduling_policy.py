"""A scheduling policy of one's own: short prompts first, with ageing.

    PYTHONPATH=. mini-infer serve --dry-run --scheduling-policy examples.scheduling_policy:ShortestPromptFirst

or `LLM("dry-run", scheduling_policy="examples.scheduling_policy:ShortestPromptFirst")`. A policy needs these three
methods and no base class; `engine/scheduling/policy.py` says when each of them is asked.
"""

from __future__ import annotations

from engine.scheduling.policy import EngineView, RequestView

TOKENS_PER_ARRIVAL = 64  # ageing: with every later arrival, a waiting prompt counts as 64 tokens shorter
KEPT_FREE = 0.05  # of all blocks, for the answers that grow
MUCH_SHORTER = 8


class ShortestPromptFirst:
    """Among equal priorities, the shortest prompt first; a long one is passed by a bounded number of later ones."""

    def key(self, request: RequestView) -> tuple[float, ...]:
        # Both of two waiting requests age alike, so their order never changes and a fixed key expresses ageing.
        return (request.priority, request.arrival + request.num_prompt_tokens / TOKENS_PER_ARRIVAL)

    def admits(self, request: RequestView, engine: EngineView) -> bool:
        num_needed = -(-request.num_prompt_tokens // engine.block_size)
        return engine.num_free_blocks - num_needed >= KEPT_FREE * engine.num_blocks

    def preempts(self, newcomer: RequestView, other: RequestView) -> bool:
        """A more urgent request does, and one that is much shorter than what the other still has of its prompt."""
        prompt_left = other.num_prompt_tokens - other.num_computed_tokens
        return newcomer.priority < other.priority or newcomer.num_prompt_tokens * MUCH_SHORTER < prompt_left
