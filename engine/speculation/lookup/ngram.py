"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last few tokens.

It suits answers that repeat the prompt or themselves: quotes, corrections, code, summaries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.speculation.drafter import LONGEST_MATCH, Drafter, Proposal
from engine.speculation.lookup.ngram_index import NgramIndex

if TYPE_CHECKING:
    from engine.request import TokenId


NUM_KINDS = LONGEST_MATCH + 1


class NgramDrafter(Drafter):
    """Drafts what followed the latest occurrence of the longest matching suffix, `min_ngram` to `max_ngram` long."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._max = max_ngram
        self._index = NgramIndex(min_ngram)

    def propose(self, token_ids: list[TokenId], max_tokens: int) -> Proposal:
        """See Drafter. A draft's kind is the length of the match that ends before it."""
        self._index.extend(token_ids)
        found, longest = 0, 0
        for end, length in self._index.matches(token_ids, token_ids, self._max):
            if length > longest:
                found, longest = end, length
                if length == self._max:
                    break
        if not found:
            return Proposal()
        following = token_ids[found : found + max_tokens]
        if len(following) < max_tokens:  # the match reaches the end of the sequence: repeat it as a period
            following *= -(-max_tokens // len(following))
        return Proposal(following[:max_tokens], [min(longest + i, LONGEST_MATCH) for i in range(max_tokens)])
