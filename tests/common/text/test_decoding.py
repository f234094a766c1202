"""Texts of tokenizers made from SentencePiece models compared with the `tokenizers` package's decoding."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.text.tokenizer import Tokenizer
from tests.common.text.sentencepiece_kinds import bpe_with_byte_fallback

KINDS = ["llama", "gemma", "metaspace"]
PIECES = ["a", "t", " the", " ", "  ", "    ", "\n", "é", "日", "😀", "\x00", "▁", "▁▁", "[INST]", "</s>", "<0x41>"]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(bpe_with_byte_fallback(kind), bos_id=1, eos_token_ids=[2], templates={})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special", [True, False])
@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_texts_are_those_of_the_backend(kind: str, skip_special: bool, pieces: list[str]) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode("".join(pieces), allow_special=True)
    expected = tokenizer._backend.decode(token_ids, skip_special_tokens=skip_special)
    assert tokenizer.decode(token_ids, skip_special) == expected
    detokenizer = tokenizer.detokenizer(skip_special)
    streamed = "".join(detokenizer.push((token_id,)) for token_id in token_ids)
    assert streamed + detokenizer.finish() == expected


def test_runs_of_spaces_that_are_added_tokens_are_spaces() -> None:
    """As in Gemma's tokenizer.json."""
    tokenizer = tokenizer_of("gemma")
    ids = tokenizer.vocabulary()
    token_ids = [ids["a"], ids["▁▁"], ids["t"], ids["\n"], ids["▁▁▁▁"], ids["▁"], ids["a"]]
    assert tokenizer.decode(token_ids) == "a  t\n     a"
    assert [tokenizer.token_bytes(token_id) for token_id in token_ids[1:5]] == [b"  ", b"t", b"\n", b"    "]
