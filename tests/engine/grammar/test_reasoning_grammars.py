"""Answers that follow a grammar after their reasoning, whichever way the reasoning is written."""

from __future__ import annotations

import pytest

from common.grammar import grammar
from common.reasoning.reasoning_format import CHANNEL_MARKERS, HARMONY, THINK, lark_after_budget, lark_before_answer
from common.tools.json_calls import HERMES
from common.tools.tool_format import text_and_calls_grammar
from tests.engine.grammar.matching import EOS, allowed, may_end

ANSWERS = {
    grammar.json_schema({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}): '{"a": 1}',
    grammar.regex("[a-c]{3}/"): "abc/",
    grammar.choice(['a "quote"\n', "no"]): 'a "quote"\n',
    grammar.choice(["ü", "\\no"]): "ü",
    grammar.lark('start: before "}"\nbefore: "{" /[0-9]+/'): "{12}",
}
ANALYSIS = "<|channel|>analysis<|message|>Hm. {<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
SPECIAL = {"</think>": 300, "<think>": 301}  # ids of tokens that have no text


@pytest.mark.parametrize(
    ("followed", "answer"), ANSWERS.items(), ids=["schema", "regex", "choice", "choice of bytes", "lark"]
)
def test_the_answer_follows_its_grammar_after_the_reasoning(followed: str, answer: str) -> None:
    may_reason = grammar.after(lark_before_answer(THINK, False, {}), followed)
    reasoning = "<think>\nHm. </thi {1}\n</think>\n\n"
    assert may_end(may_reason, reasoning + answer) == (True, True)
    assert may_end(may_reason, answer) == (True, True)
    assert may_end(may_reason, reasoning[:-12] + answer) == (True, False)  # still reasoning
    assert may_end(may_reason, reasoning + "!") == (False, False)
    assert may_end(may_reason, "Hm.") == (False, False)


def test_the_prompt_may_have_begun_the_reasoning() -> None:
    followed = grammar.after(lark_before_answer(THINK, True, {}), next(iter(ANSWERS)))
    assert may_end(followed, 'Hm.</think>\n{"a": 1}') == (True, True)
    assert may_end(followed, '{"a": 1}') == (True, False)


def test_an_answer_of_any_text_begins_behind_the_reasoning() -> None:
    """A grammar of calls in a text does not constrain calls within the reasoning."""
    schemas = {"f": {"type": "object", "properties": {}, "additionalProperties": False}}
    answer = text_and_calls_grammar(HERMES, schemas, True, {})
    followed = grammar.after(lark_before_answer(THINK, False, {}), answer)
    assert may_end(followed, "<think>\nA <tool_call> or none?\n</think>\n\nNone.") == (True, True)
    assert may_end(followed, "<think>\nHm.\n</think>\n\n<tool_call> or none") == (False, False)
    assert may_end(followed, "<thin> air") == (True, True)


NEVER = frozenset({300, 301, EOS})


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_reasoning_ends_when_its_budget_is_spent(num_tokens: int) -> None:
    begin, end = SPECIAL["<think>"], SPECIAL["</think>"]
    before, any_answer = lark_after_budget(THINK, False, SPECIAL, (num_tokens, NEVER))
    followed = grammar.after(before, grammar.lark(any_answer))
    thought = [begin, *b"xyz"[:num_tokens]]
    for length in range(num_tokens):
        assert set(allowed(followed, thought[: length + 1])) == set(range(320)) - NEVER | {end}
    assert allowed(followed, thought) == [end]
    assert set(allowed(followed, [*thought, end, *b"Yes."])) == set(range(320)) - {begin}
    assert set(allowed(followed, [*b"Yes."])) == set(range(320)) - {begin}  # it need not reason
    assert may_end(followed, [*thought, end, *b"Yes."]) == (True, True)
    opened, _ = lark_after_budget(THINK, True, SPECIAL, (num_tokens, NEVER))
    assert allowed(grammar.after(opened, grammar.lark(any_answer)), thought[1:]) == [end]
    strict = grammar.after(opened, grammar.regex("[a-c]"))
    assert may_end(strict, [*thought[1:], end, *b"\na"]) == (True, True)
    assert may_end(strict, [*thought[1:], end, *b"\nx"]) == (False, False)


def test_channels_may_have_a_budget() -> None:
    special = {marker: 300 + place for place, marker in enumerate(CHANNEL_MARKERS)}
    budget = 3, frozenset(special.values())
    channel, message = special["<|channel|>"], special["<|message|>"]
    before, answer = lark_after_budget(HARMONY, False, special, budget)
    followed = grammar.after(before, grammar.lark(answer))
    analysis = [channel, *b"analysis", message, *b"xyz"]
    assert allowed(followed, analysis) == [special["<|end|>"]]
    start = [*analysis, special["<|end|>"], special["<|start|>"], *b"assistant", channel]
    assert allowed(followed, start) == [ord("c"), ord("f")]  # no second analysis
    assert may_end(followed, [*start, *b"final", message, *b"Yes."]) == (True, True)
    call = [*start, *b"commentary to=functions.f", message, *b"{}", special["<|call|>"]]
    assert may_end(followed, call) == (True, True)
    final = lark_before_answer(HARMONY, False, special, budget)
    assert allowed(grammar.after(final, grammar.regex("[a-c]")), start) == [ord("f")]


def test_markers_may_be_special_tokens() -> None:
    followed = grammar.after(lark_before_answer(THINK, False, SPECIAL), grammar.regex("[a-c]"))
    assert may_end(followed, [301, *b"Hm. </think> a", 300, *b"\na"]) == (True, True)
    assert may_end(followed, [*b"<think>"]) == (False, False)


def test_an_answer_of_channels_follows_the_grammar_in_the_last_one() -> None:
    followed = grammar.after(lark_before_answer(HARMONY, False, {}), grammar.regex("[a-c]"))
    assert may_end(followed, f"{ANALYSIS}{FINAL}a") == (True, True)
    assert may_end(followed, f"{FINAL}a") == (True, True)
    assert may_end(followed, "a") == (False, False)
