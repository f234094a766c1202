"""Suffix decoding: what followed the longest suffix in the request's own text, and in the engine's earlier answers.

Good where requests resemble each other: agents that edit the same files, programs that ask the same thing again. As
in SuffixDecoding (arXiv:2411.04975) each draft is the token that most occurrences continue with.
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

SIZE = 3  # of the n-grams that are looked up: shorter matches tell little
LONGEST = 32  # tokens of a match that are compared
SEPARATOR = -1  # between answers
MAX_SALTS = 256
NUM_KINDS = 3 * (LONGEST_MATCH + 1)  # by the share of occurrences: less than half, half or more, all


class Answers:
    """Earlier answers, one after the other, the latest of them up to `max_tokens` tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.token_ids: list[TokenId] = []
        self.index = NgramIndex(SIZE)

    def add(self, answer: Sequence[TokenId]) -> None:
        if len(self.token_ids) > 2 * self._max_tokens:  # seldom, since it takes a microsecond a token
            del self.token_ids[: -self._max_tokens]
            self.index = NgramIndex(SIZE)
        self.token_ids += answer[-self._max_tokens :]
        self.token_ids.append(SEPARATOR)
        self.index.extend(self.token_ids)


class AnswersBySalt:
    """Answers of one engine, by the cache salt of their requests: those of others stay hidden."""

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
    """Drafts of one request."""

    def __init__(self, answers: Answers, request: RequestState) -> None:
        self._answers = answers
        self._request = request
        self._own = NgramIndex(SIZE)

    def propose(self, token_ids: list[TokenId], max_tokens: int) -> Proposal:
        """See Drafter. A draft's kind is the length of the match, and the share of occurrences that go on with it."""
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
        """Keep the answer for others."""
        self._answers.add(self._request.output_token_ids)


def _by_votes(
    places: list[tuple[Sequence[TokenId], int]], own: Sequence[TokenId], longest: int, max_tokens: int
) -> Proposal:
    """Go on as most places do, and from there as most of those that did. places: texts, and positions in them."""
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
    return drafts[end - len(text)] if text is own else SEPARATOR  # a match at the end of its own text: a period
