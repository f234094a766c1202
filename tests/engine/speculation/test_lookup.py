"""Prompt lookup and suffix decoding against their definitions, and the answers that the latter may read."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.request import RequestId, SamplingParams
from engine.request_states import RequestState
from engine.speculation.lookup import ngram_index, suffix
from engine.speculation.lookup.ngram import NgramDrafter
from engine.speculation.lookup.suffix import LONGEST, SIZE, Answers, AnswersBySalt, SuffixDrafter


def by_ngrams(token_ids: list[int], max_ngram: int, min_ngram: int, max_tokens: int) -> list[int]:
    """Return what follows the latest earlier occurrence of the longest n-gram, repeated if it reaches the end."""
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
    token_ids=st.lists(st.integers(0, 2), min_size=30, max_size=60),
    first=st.integers(1, 60),
    max_ngram=st.integers(1, 9),
    min_ngram=st.integers(1, 3),
    max_tokens=st.integers(1, 6),
)
def test_drafts_of_ngrams_are_what_the_definition_says(
    token_ids: list[int], first: int, max_ngram: int, min_ngram: int, max_tokens: int
) -> None:
    """One drafter is asked again and again while the sequence grows, the first time with several tokens."""
    max_ngram = max(max_ngram, min_ngram)
    drafter = NgramDrafter(max_ngram, min_ngram)
    for stop in range(min(first, len(token_ids)), len(token_ids) + 1):
        known = token_ids[:stop]
        assert drafter.propose(known, max_tokens).token_ids == by_ngrams(known, max_ngram, min_ngram, max_tokens)
        assert known == token_ids[:stop]


def test_a_frequent_ngram_is_not_followed_for_ever() -> None:
    """Only the last occurrences are compared; the longest match is far before them."""
    for num_between, proposed in ((ngram_index.MAX_OCCURRENCES - 1, [9]), (ngram_index.MAX_OCCURRENCES, [0])):
        tokens = [1, 2, 5, 6, 9, *[5, 6, 0] * num_between, 1, 2, 5, 6]
        assert NgramDrafter(4, 2).propose(tokens, 1).token_ids == proposed


# -- suffix decoding ----------------------------------------------------------------------------------------------


def by_suffixes(own: list[int], answers: list[list[int]], max_tokens: int) -> list[int]:
    """Return the most frequent continuation of the longest suffix that occurred before; the latest wins a tie."""
    earlier = [(answer, end) for answer in reversed(answers) for end in range(len(answer), SIZE - 1, -1)]
    places = [(own, end) for end in range(len(own) - 1, SIZE - 1, -1)] + earlier
    for size in range(min(LONGEST, len(own)), SIZE - 1, -1):
        found = [(text, end) for text, end in places if end >= size and text[end - size : end] == own[-size:]]
        if found:
            return most_frequent(found, own, max_tokens)
    return []


def most_frequent(places: list[tuple[list[int], int]], own: list[int], max_tokens: int) -> list[int]:
    drafts: list[int] = []
    for _ in range(max_tokens):
        texts = [(text + drafts if text is own else text, text, end) for text, end in places]
        nexts = [longer[end] if end < len(longer) else -1 for longer, _, end in texts]
        [(token_id, _)] = Counter(nexts).most_common(1)
        if token_id == -1:
            break
        drafts.append(token_id)
        places = [(text, end + 1) for (_, text, end), after in zip(texts, nexts, strict=True) if after == token_id]
    return drafts


def state(token_ids: list[int], num_prompt_tokens: int) -> RequestState:
    return RequestState(RequestId("r"), token_ids, num_prompt_tokens, SamplingParams())


TEXTS = st.lists(st.integers(0, 2), min_size=20, max_size=40)


@given(own=TEXTS, answers=st.lists(TEXTS, max_size=3), max_tokens=st.integers(1, 6), first=st.integers(1, 40))
def test_drafts_of_suffixes_are_what_the_definition_says(
    own: list[int], answers: list[list[int]], max_tokens: int, first: int
) -> None:
    kept = Answers(1000)
    for answer in answers:
        kept.add(answer)
    drafter = SuffixDrafter(kept, state(own, 1))
    for stop in range(min(first, len(own)), len(own) + 1):
        known = own[:stop]
        proposal = drafter.propose(known, max_tokens)
        assert proposal.token_ids == by_suffixes(known, answers, max_tokens)
        assert len(proposal.kinds) == len(proposal.token_ids)
        assert all(0 <= kind < suffix.NUM_KINDS for kind in proposal.kinds)


def test_an_answer_is_drafted_from_an_earlier_one() -> None:
    answers = Answers(100)
    SuffixDrafter(answers, state([1, 2, 10, 11, 12, 13, 14], 2)).end()
    assert SuffixDrafter(answers, state([], 0)).propose([7, 10, 11, 12], 4).token_ids == [13, 14]
    assert SuffixDrafter(answers, state([], 0)).propose([7, 1, 2, 10], 4).token_ids == []  # prompts are not kept


def test_a_longer_match_and_a_common_continuation_are_better_kinds() -> None:
    answers = Answers(100)
    for last in (4, 4, 5):
        answers.add([1, 2, 3, last])
    few = SuffixDrafter(answers, state([], 0)).propose([9, 1, 2, 3], 1)
    answers.add([6, 6, 6, 1, 2, 3, 4])
    more = SuffixDrafter(answers, state([], 0)).propose([6, 6, 6, 1, 2, 3], 1)
    assert few.token_ids == more.token_ids == [4]
    assert few.kinds[0] < more.kinds[0]


def test_old_answers_are_dropped() -> None:
    answers = Answers(50)
    for number in range(40):
        answers.add([100 * number + i for i in range(10)])
        assert len(answers.token_ids) <= 2 * 50 + 11
    assert SuffixDrafter(answers, state([], 0)).propose([0, 1, 2], 1).token_ids == []
    assert SuffixDrafter(answers, state([], 0)).propose([3900, 3901, 3902], 1).token_ids == [3903]
    answers.add(list(range(10_000, 10_200)))
    assert len(answers.token_ids) <= 2 * 50 + 51 + 51


def test_salts_hide_answers_from_each_other() -> None:
    by_salt = AnswersBySalt(100)
    by_salt.of("a").add([1, 2, 3, 4])
    assert SuffixDrafter(by_salt.of("a"), state([], 0)).propose([1, 2, 3], 1).token_ids == [4]
    assert SuffixDrafter(by_salt.of("b"), state([], 0)).propose([1, 2, 3], 1).token_ids == []
    for number in range(suffix.MAX_SALTS):
        by_salt.of(str(number))
    assert by_salt.of("a").token_ids == []
