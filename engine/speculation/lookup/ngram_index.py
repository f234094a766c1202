"""An index of a sequence's n-grams: a dictionary of latest occurrences, and links to the previous ones.

Both grow with the sequence, so a call's cost depends on the new tokens, not on the whole sequence. The links are the
hash chains of LZ77 compressors; a suffix tree finds the same matches, but needs an object per token and depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.request import TokenId

MAX_OCCURRENCES = 64  # most occurrences per call, the latest ones, so that a frequent n-gram does not delay a step


class NgramIndex:
    """The n-grams of one size in one sequence."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._latest: dict[tuple[TokenId, ...], int] = {}  # the end of an n-gram's latest occurrence
        self._previous = [0] * size  # by the end of an occurrence: the end of the previous one; 0: none

    def extend(self, token_ids: Sequence[TokenId]) -> None:
        """Add the n-grams that end before the last token: a suffix is not its own occurrence.

        token_ids: the sequence, with new tokens at its end.
        """
        latest, previous, size = self._latest, self._previous, self._size
        for end in range(len(previous), len(token_ids)):
            ngram = tuple(token_ids[end - size : end])
            previous.append(latest.get(ngram, 0))
            latest[ngram] = end

    def matches(
        self, token_ids: Sequence[TokenId], suffix_of: Sequence[TokenId], longest: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the occurrences of the last tokens of `suffix_of` in the sequence, latest first.

        Each is the end of the occurrence and its number of matching tokens, at most `longest`.
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
