"""What drafts by a request's text, without a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from engine.request import TokenId

LONGEST_MATCH = 32  # in tokens; longer ones count as this one


class Proposal(NamedTuple):
    """Drafts, and a kind for each, see Acceptance."""

    token_ids: list[TokenId] = []  # noqa: RUF012 - never changed
    kinds: list[int] = []  # noqa: RUF012 - never changed


class Drafter(ABC):
    """Proposes the next tokens of one request, and may keep what it has learned of that request."""

    @abstractmethod
    def propose(self, token_ids: list[TokenId], max_tokens: int) -> Proposal:
        """Return at most `max_tokens` tokens of the vocabulary that may follow; none when it has no idea.

        token_ids: prompt and output so far, not to be changed. The same list in each call, grown at its end.
        """

    def end(self) -> None:  # noqa: B027
        """The request has ended, or will get another drafter."""
