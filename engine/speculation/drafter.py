"""The interface of drafters, which draft from a request's text, without a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from engine.request import TokenId

LONGEST_MATCH = 32  # tokens; a longer match counts as one of this length


class Proposal(NamedTuple):
    """Drafts, each with its kind (see Acceptance)."""

    token_ids: list[TokenId] = []  # noqa: RUF012 - never changed
    kinds: list[int] = []  # noqa: RUF012 - never changed


class Drafter(ABC):
    """Proposes the next tokens of one request, and may learn from its text."""

    @abstractmethod
    def propose(self, token_ids: list[TokenId], max_tokens: int) -> Proposal:
        """Return at most `max_tokens` tokens of the vocabulary that may follow, or none.

        token_ids: prompt and output so far, read-only. Every call passes the same list, with new tokens at its end.
        """

    def end(self) -> None:  # noqa: B027
        """Called when the request has ended, or will get another drafter."""
