"""Prompt lookup against its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.lookup import ngram_index
from engine.speculation.lookup.ngram import NgramDrafter


def by_definition(token_ids: list[int], max_ngram: int, min_ngram: int, max_tokens: int) -> list[int]:
    """Longest n-gram first, latest earlier occurrence, what follows it: as a period where it reaches the end."""
    for size in range(max_ngram, min_ngram - 1, -1):
        suffix = token_ids[-size:]
        for end in range(len(token_ids) - 1, size - 1, -1):
            if len(suffix) == size and token_ids[end - size : end] == suffix:
                extended = list(token_ids)
                for index in range(max_tokens):
                    extended.append(extended[end + index])
                return extended[len(token_ids) :]
    return []


@given(
    token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    first=st.integers(1, 60),
    max_ngram=st.integers(1, 5),
    min_ngram=st.integers(1, 5),
    max_tokens=st.integers(1, 6),
)
def test_every_prefix_gets_what_the_definition_says(
    token_ids: list[int], first: int, max_ngram: int, min_ngram: int, max_tokens: int
) -> None:
    """One drafter is asked again and again while the sequence grows, the first time with several tokens."""
    max_ngram = max(max_ngram, min_ngram)
    drafter = NgramDrafter(max_ngram, min_ngram)
    for stop in range(min(first, len(token_ids)), len(token_ids) + 1):
        known = token_ids[:stop]
        assert drafter.propose(known, max_tokens).token_ids == by_definition(known, max_ngram, min_ngram, max_tokens)
        assert known == token_ids[:stop]


def test_the_longest_match_wins_over_a_later_one() -> None:
    drafter = NgramDrafter(3, 1)
    assert drafter.propose([1, 2, 3, 7, 8, 9, 3, 5, 1, 2, 3], 2).token_ids == [7, 8]
    assert NgramDrafter(1, 1).propose([1, 2, 3, 7, 8, 9, 3, 5, 1, 2, 3], 2).token_ids == [5, 1]


def test_a_frequent_ngram_is_not_followed_for_ever() -> None:
    """Only the last occurrences are compared: the longest one is far behind them."""
    for num_between, proposed in ((ngram_index.MAX_OCCURRENCES - 1, [9]), (ngram_index.MAX_OCCURRENCES, [0])):
        tokens = [1, 2, 5, 6, 9, *[5, 6, 0] * num_between, 1, 2, 5, 6]
        assert NgramDrafter(4, 2).propose(tokens, 1).token_ids == proposed


def test_too_few_tokens_propose_nothing() -> None:
    drafter = NgramDrafter(4, 3)
    for length in range(1, 5):
        assert drafter.propose([7] * length, 4).token_ids == ([7] * 4 if length == 4 else [])
