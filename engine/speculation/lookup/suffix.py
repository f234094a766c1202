"""Suffix decoding: drafts what followed the longest matching suffix in the request or in earlier answers.

It suits requests that resemble each other: agents that edit the same files, programs that repeat a question. As in
SuffixDecoding (arXiv:2411.04975), each draft is the most frequent continuation.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.speculation.drafter import LONGEST_MATCH, Drafter, Proposal
from engine.speculation.lookup.ngram_index import NgramIndex

if TYPE_CHECKING:
    from engine.request import TokenId
    from engine.request_states import RequestState

SIZE = 3  # of the n-grams that are looked up; shorter matches predict little
LONGEST = 32  # most tokens of a match
SEPARATOR = -1  # between answers
MAX_SALTS = 256
NUM_KINDS = 3 * (LONGEST_MATCH + 1)  # match length, times the share of occurrences: less than half, half or more, all


class Answers:
    """Earlier answers, concatenated; the latest `max_tokens` tokens of them."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.token_ids: list[TokenId] = []
        self.index = NgramIndex(SIZE)

    def add(self, answer: Sequence[TokenId]) -> None:
        if len(self.token_ids) > 2 * self._max_tokens:  # rarely: it takes a microsecond per token
            del self.token_ids[: -self._max_tokens]
            self.index = NgramIndex(SIZE)
        self.token_ids += answer[-self._max_tokens :]
        self.token_ids.append(SEPARATOR)
        self.index.extend(self.token_ids)


class AnswersBySalt:
    """An engine's answers by the cache salt of their requests, which hides them from other clients."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._by_salt: OrderedDict[str, Answers] = OrderedDict()

    def of(self, salt: str) -> Answers:
        answers = self._by_salt.get(salt)
        if answers is None:
            if len(self._by_salt) >= MAX_SALTS:
                self._by_salt.popitem(last=False)
            answers = self._by_salt[salt] = Answers(self._max_tokens)
        self._by_salt.move_to_end(salt)
        return answers


class SuffixDrafter(Drafter):
    """Drafts for one request."""

    def __init__(self, answers: Answers, request: RequestState) -> None:
        self._answers = answers
        self._request = request
        self._own = NgramIndex(SIZE)

    def propose(self, token_ids: list[TokenId], max_tokens: int) -> Proposal:
        """See Drafter. A draft's kind: length of the match, and share of occurrences that continue with the draft."""
        self._own.extend(token_ids)
        places: list[tuple[int, Sequence[TokenId], int]] = [
            (length, text, end)
            for text, index in ((token_ids, self._own), (self._answers.token_ids, self._answers.index))
            for end, length in index.matches(text, token_ids, LONGEST)
        ]
        if not places:
            return Proposal()
        longest = max(length for length, _, _ in places)
        best = [(text, end) for length, text, end in places if length == longest]
        return _by_votes(best, token_ids, longest, max_tokens)

    def end(self) -> None:
        """Add the answer to those that later requests look up."""
        self._answers.add(self._request.output_token_ids)


def _by_votes(
    places: list[tuple[Sequence[TokenId], int]], own: Sequence[TokenId], longest: int, max_tokens: int
) -> Proposal:
    """Draft what most places continue with, and then what most of these places do. places: texts and positions."""
    drafts: list[TokenId] = []
    kinds: list[int] = []
    while len(drafts) < max_tokens:
        nexts = [_next(text, end, drafts, own) for text, end in places]
        token_id, votes = Counter(nexts).most_common(1)[0]
        if token_id == SEPARATOR:
            break
        share = 0 if 2 * votes < len(places) else 1 if votes < len(places) else 2
        kinds.append(min(longest + len(drafts), LONGEST_MATCH) + (LONGEST_MATCH + 1) * share)
        drafts.append(token_id)
        places = [(text, end + 1) for (text, end), after in zip(places, nexts, strict=True) if after == token_id]
    return Proposal(drafts, kinds)


def _next(text: Sequence[TokenId], end: int, drafts: Sequence[TokenId], own: Sequence[TokenId]) -> TokenId:
    if end < len(text):
        return text[end]
    return drafts[end - len(text)] if text is own else SEPARATOR  # a match at the end of its own text is a period
