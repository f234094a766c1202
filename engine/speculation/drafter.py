"""Drafters: the interface, and the choice of one by the settings.

A drafter cannot change a request's output, only its speed: a draft is accepted when it equals the token that is
sampled at its position, which is the one that the request would get without drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from engine.speculation.ngram import NgramDrafter

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.request import TokenId


class Drafter(Protocol):
    """Proposes the next tokens of one request, and may keep what it has learned of that request."""

    def propose(self, token_ids: list[TokenId], max_tokens: int) -> list[TokenId]:
        """Return at most `max_tokens` tokens of the vocabulary that may follow; none when it has no idea.

        token_ids: prompt and output so far, not to be changed. The same list in each call, grown at its end.
        """
        ...


MakeDrafter = Callable[[], Drafter]


def drafter_for(config: EngineConfig) -> MakeDrafter:
    """Factory of a drafter per request. Another kind is a file beside `ngram.py`, and is selected here."""
    return partial(NgramDrafter, config.ngram_max, config.ngram_min)
