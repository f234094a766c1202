"""Which rows of a step compute generated tokens."""

from __future__ import annotations

from engine.plan import ScheduledRow
from engine.request_states import RequestState


def is_generated(row: ScheduledRow, request: RequestState) -> bool:
    """Whether the row computes generated tokens: one, with its drafts if it has any, or several that are replayed.

    The last token of a prompt whose others are cached is not: it is computed as if nothing had been cached.
    """
    return row.start >= request.num_prompt_tokens
