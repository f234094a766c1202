"""Which tokens may come next: after drafts that are taken back, and by grammars beyond their limits."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from common.errors import GRAMMAR_REFUSED, EngineError, InvalidRequestError, UnsupportedModelError
from common.grammar import grammar
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.grammar.grammars import NUM_CACHED, GrammarMatcher, Grammars
from tests.engine.grammar.matching import DRY_RUN, EOS, in_mask

VOCAB_SIZE = DRY_RUN.vocab_size + 37  # a model may have more tokens than its tokenizer
AMBIGUOUS = 'start: e\ne: "(" e ")" | e e | /[a-z]/'


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: DRY_RUN, VOCAB_SIZE)


def allowed(matcher: GrammarMatcher, output: list[int]) -> list[int]:
    words = matcher.allowed(output)
    assert words is not None
    assert len(words) == -(-VOCAB_SIZE // 32)
    return in_mask(words)


def test_only_the_end_comes_after_a_complete_answer(grammars: Grammars) -> None:
    matcher = grammars.start(grammar.json_object()).result()
    assert EOS not in allowed(matcher, list(b'{"a": "b'))
    assert allowed(matcher, list(b'{"a": "b"}')) == [EOS]


def test_special_tokens_are_no_text(grammars: Grammars) -> None:
    matcher = grammars.start(grammar.json_schema({"type": "string"})).result()
    assert not DRY_RUN.special_ids.intersection(allowed(matcher, list(b'"<eos')))


def test_tokens_are_taken_back(grammars: Grammars) -> None:
    """Tokens of rejected drafts, whether they followed the grammar or not, and of repeated steps."""
    matcher = grammars.start(grammar.json_schema({"enum": ["abcd", "abxy"]})).result()
    begun = list(b'"ab')
    after = allowed(matcher, begun)
    assert after == sorted(b"cx")
    assert allowed(matcher, [*begun, *b"cd"]) == [ord('"')]
    assert matcher.allowed([*begun, *b"zz"]) is None
    assert allowed(matcher, [*begun, *b"x"]) == [ord("y")]
    assert allowed(matcher, begun) == after
    assert allowed(matcher, [*begun, *b'xy"']) == [EOS]
    assert allowed(matcher, begun[:1]) == [ord("a")]


@pytest.mark.parametrize("text", [AMBIGUOUS, 'start: e\ne: e e | "b" | "a"?'])
def test_a_grammar_at_its_limits_ends_with_an_error_and_is_compiled_again(grammars: Grammars, text: str) -> None:
    """The matcher follows every parse of a text, and their number grows. Copies share an automaton: one that has
    failed would fail all later answers.
    """
    followed = grammar.lark(text)
    grammar.check_grammar(followed)
    matcher = grammars.start(followed).result()
    compiled = grammars.compile(followed)

    def follow() -> None:
        for length in range(2_000):
            matcher.allowed(list(b"a" * length))

    with pytest.raises(EngineError, match="too complex"):
        follow()
    assert grammars.compile(followed) is not compiled
    assert allowed(grammars.start(followed).result(), list(b"a"))


@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_tokenizer_is_loaded_once_ahead_or_when_it_is_needed(is_prepared: bool) -> None:
    loads = []

    def load() -> Any:
        loads.append(1)
        return DRY_RUN

    grammars = Grammars(load, VOCAB_SIZE)
    assert not loads
    if is_prepared:
        assert grammars.prepare().exception() is None
        assert loads == [1]
    for text in ("a", "b", "a"):
        grammars.start(grammar.choice([text])).result()
    assert loads == [1]
    with pytest.raises(InvalidRequestError):
        grammars.start("regex:(").result()


def test_without_a_tokenizer_only_grammars_fail() -> None:
    def load() -> Any:
        raise UnsupportedModelError("no tokenizer.json")

    grammars = Grammars(load, VOCAB_SIZE)
    assert isinstance(grammars.prepare().exception(), UnsupportedModelError)
    with pytest.raises(UnsupportedModelError):
        grammars.start(grammar.choice(["a"])).result()


def test_a_model_without_an_end_token_takes_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers tell a client's mistake from a fault by the beginning of the message."""
    tokenizer = load_tokenizer(resolve_model("dry-run"))
    monkeypatch.setattr(tokenizer, "eos_token_ids", ())
    with pytest.raises(InvalidRequestError, match=f"^{GRAMMAR_REFUSED}cannot end"):
        Grammars(lambda: tokenizer, VOCAB_SIZE).start(grammar.choice(["a"])).result()


def test_compiled_grammars_are_found_while_somebody_holds_them_and_few_beyond_that(grammars: Grammars) -> None:
    held, left = (grammars.compile(grammar.choice([text])) for text in ("held", "left"))
    left_id = weakref.ref(left)
    del left
    for number in range(NUM_CACHED):
        grammars.compile(grammar.choice([f"other {number}"])).result()
    assert grammars.compile(grammar.choice(["held"])) is held
    gc.collect()
    assert left_id() is None
