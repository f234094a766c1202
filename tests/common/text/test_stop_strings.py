"""The end of a text does not depend on how it was split into pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.text.stop_strings import StopStringMatcher


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops, include)
    shown = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    return shown, matcher.match


@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    include=st.booleans(),
)
def test_any_cutting_gives_the_same(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:stop] for start, stop in itertools.pairwise(edges)]
    by_character = run(list(text), stops, include)
    assert run(pieces, stops, include) == by_character
    assert run([text], stops, include) == by_character
    shown, found = by_character
    if found is None:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown)
        assert any(stop in shown for stop in stops) == include or not include


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["one END two"], ["END"], "one "),
        (["one E", "N", "D two"], ["END"], "one "),
        (["aab"], ["ab"], "a"),
        (["ab", "cd"], ["abcd", "bc"], "a"),  # the one that is complete first
        (["xyz"], ["yz", "xyz"], ""),  # the longer one of two that are complete together
        (["EN", "x"], ["END"], "ENx"),
        (["stop", "s"], ["s"], ""),
    ],
)
def test_cases(pieces: list[str], stops: list[str], expected: str) -> None:
    assert run(pieces, stops)[0] == expected


def test_a_possible_beginning_is_held_back_and_nothing_more() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.push("one EN") == "one "
    assert matcher.push("x") == "ENx"
    assert matcher.push("END") == ""
    assert matcher.push("after") == ""
    assert matcher.flush() == ""


def test_skipped_text_takes_no_part() -> None:
    matcher = StopStringMatcher(["ab"])
    assert matcher.skip("ab a") == "ab a"
    assert matcher.push("b") == "b"
    assert matcher.push("ab") == ""
