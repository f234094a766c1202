"""Streamed text adds up to the whole text, for any tokens and any split into pieces."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.text.detokenizer import Detokenizer, TokenTable
from tests.common.default_model import default_tokenizer

SMOL = default_tokenizer()


@settings(max_examples=100)
@given(data=st.data())
def test_pieces_concatenate_to_the_whole(data: st.DataObject) -> None:
    text_ids = SMOL.encode(data.draw(st.text(max_size=30)), allow_special=True)
    noise = data.draw(st.lists(st.integers(0, SMOL.vocab_size + 5), max_size=10))
    token_ids = data.draw(st.permutations(text_ids + noise)) if data.draw(st.booleans()) else text_ids + noise
    detokenizer = SMOL.detokenizer()
    pieces = []
    while token_ids[len(pieces) :]:
        pieces.append(detokenizer.push(token_ids[len(pieces) : len(pieces) + 1]))
    assert "".join(pieces) + detokenizer.finish() == SMOL.decode(token_ids)
    backend = SMOL._backend.decode([t for t in token_ids if t < SMOL.vocab_size], skip_special_tokens=True)
    assert SMOL.decode(token_ids) == backend


def test_half_a_character_is_held_back() -> None:
    token_ids = SMOL.encode("x👩‍👩‍👧你 y")
    detokenizer = SMOL.detokenizer()
    pieces = [detokenizer.push((token_id,)) for token_id in token_ids]
    assert "".join(pieces) == "x👩‍👩‍👧你 y"
    assert len(token_ids) > 8  # the characters are split over tokens
    assert not any("�" in piece for piece in pieces)


def test_a_character_that_never_completes_shows_once_it_is_certain() -> None:
    pieces = {0: b"\xf0\x9f", 1: b"a", 2: b"\xa4\x96"}
    table = TokenTable(3, pieces.get, frozenset(), strips_prefix_space=False)
    broken = Detokenizer(table)
    assert [broken.push([0]), broken.push([1]), broken.finish()] == ["", "�a", ""]
    whole = Detokenizer(table)
    assert [whole.push([0]), whole.push([2])] == ["", "🤖"]
    cut = Detokenizer(table)
    assert [cut.push([0]), cut.finish()] == ["", "�"]


def test_special_tokens_and_the_space_of_sentencepiece() -> None:
    pieces = {0: b"<s>", 1: b" Hello", 2: b" world", 3: b" "}
    table = TokenTable(4, pieces.get, frozenset({0}), strips_prefix_space=True)
    assert Detokenizer(table).push([0, 1, 2]) == "Hello world"
    assert Detokenizer(table, continues=True).push([0, 1, 2]) == " Hello world"
    assert Detokenizer(table, skip_special=False, continues=True).push([0, 1]) == "<s> Hello"
    one_by_one = Detokenizer(table)
    assert [one_by_one.push([token_id]) for token_id in (0, 3, 1, 2)] == ["", "", " Hello", " world"]
