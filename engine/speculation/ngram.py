"""Prompt lookup: what followed the last few tokens when they stood in the sequence before.

Good where an answer repeats its prompt or itself: quotes, corrections, code, summaries. Every sequence of `min_ngram`
tokens is found through a dictionary of where it stood last and, from there, where before that; both grow with the
sequence, so that a call costs what the new tokens cost and not the whole context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.request import TokenId

MAX_OCCURRENCES = 64  # looked at in one call, the latest ones: a frequent n-gram must not make a step longer


class NgramDrafter:
    """The tokens behind the latest occurrence of the longest suffix that has one, `min_ngram` to `max_ngram` long."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._max = max_ngram
        self._min = min_ngram
        self._latest: dict[tuple[TokenId, ...], int] = {}  # the end of an n-gram's latest occurrence
        self._previous = [0] * min_ngram  # by end of an occurrence: that of the one before; 0: none

    def propose(self, token_ids: list[TokenId], max_tokens: int) -> list[TokenId]:
        """See Drafter."""
        self._index(token_ids)
        end = self._longest_match(token_ids)
        if not end:
            return []
        following = token_ids[end : end + max_tokens]
        if len(following) < max_tokens:  # it reaches the end of the sequence: go on as a period
            following *= -(-max_tokens // len(following))
        return following[:max_tokens]

    def _index(self, token_ids: list[TokenId]) -> None:
        """Take in the n-grams that end before the last token: the suffix is not an occurrence of itself."""
        latest, previous, size = self._latest, self._previous, self._min
        for end in range(len(previous), len(token_ids)):
            ngram = tuple(token_ids[end - size : end])
            previous.append(latest.get(ngram, 0))
            latest[ngram] = end

    def _longest_match(self, token_ids: list[TokenId]) -> int:
        """The end of the occurrence to continue; 0: there is none."""
        found, longest = 0, 0
        end = self._latest.get(tuple(token_ids[-self._min :]), 0)
        for _ in range(MAX_OCCURRENCES):
            if not end:
                break
            length = self._min
            while length < self._max and length < end and token_ids[end - 1 - length] == token_ids[-1 - length]:
                length += 1
            if length > longest:
                found, longest = end, length
                if length == self._max:
                    break
            end = self._previous[end]
        return found
