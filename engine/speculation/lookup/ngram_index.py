"""Where a sequence has its n-grams: a dictionary of where each stood last and, from there, where before that.

Both grow with the sequence, so that a call costs what the new tokens cost and not the whole sequence. These are the
hash chains of LZ77 compressors; a suffix tree finds the same and takes an object per token and depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.request import TokenId

MAX_OCCURRENCES = 64  # looked at in one call, the latest ones: a frequent n-gram must not make a step longer


class NgramIndex:
    """N-grams of one size in one sequence."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._latest: dict[tuple[TokenId, ...], int] = {}  # the end of an n-gram's latest occurrence
        self._previous = [0] * size  # by end of an occurrence: that of the one before; 0: none

    def extend(self, token_ids: Sequence[TokenId]) -> None:
        """Take in the n-grams that end before the last token: a suffix is not an occurrence of itself.

        token_ids: the sequence, which has grown at its end.
        """
        latest, previous, size = self._latest, self._previous, self._size
        for end in range(len(previous), len(token_ids)):
            ngram = tuple(token_ids[end - size : end])
            previous.append(latest.get(ngram, 0))
            latest[ngram] = end

    def matches(
        self, token_ids: Sequence[TokenId], suffix_of: Sequence[TokenId], longest: int
    ) -> Iterator[tuple[int, int]]:
        """Yield where the last tokens of `suffix_of` occurred in the sequence, latest first.

        Each is the end of the occurrence, and how many tokens match there, at most `longest`.
        """
        end = self._latest.get(tuple(suffix_of[-self._size :]), 0)
        for _ in range(MAX_OCCURRENCES):
            if not end:
                return
            length, most = self._size, min(longest, end, len(suffix_of))
            while length < most and token_ids[end - 1 - length] == suffix_of[-1 - length]:
                length += 1
            yield end, length
            end = self._previous[end]
