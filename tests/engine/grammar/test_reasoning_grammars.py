"""Answers that follow a grammar after their reasoning, whichever way the reasoning is written."""

from __future__ import annotations

import pytest

from common.grammar import grammar
from common.model_files import resolve_model
from common.reasoning.reasoning_format import (
    CHANNEL_MARKERS,
    HARMONY,
    THINK,
    lark_after_budget,
    lark_before_answer,
)
from common.text.load import load_tokenizer
from common.tools.json_calls import HERMES
from common.tools.tool_format import text_and_calls_grammar
from engine.grammar.grammars import Grammars

DRY_RUN = load_tokenizer(resolve_model("dry-run"))
ANSWERS = {
    grammar.json_schema({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}): '{"a": 1}',
    grammar.regex("[a-c]{3}/"): "abc/",
    grammar.choice(["yes", "no"]): "yes",
    grammar.lark('start: before "}"\nbefore: "{" /[0-9]+/'): "{12}",
}
ANALYSIS = "<|channel|>analysis<|message|>Hm. {<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
SPECIAL = {"</think>": 300, "<think>": 301}  # ids of tokens that have no text


def follows(followed: str, token_ids: list[int]) -> tuple[bool, bool]:
    """Whether a text may begin so, and whether it may end there."""
    matcher = Grammars(lambda: DRY_RUN, 320).start(followed).result()
    words = matcher.allowed(token_ids)
    end = DRY_RUN.eos_token_ids[0]
    return words is not None, words is not None and bool(words[end // 32] >> (end % 32) & 1)


def ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(("followed", "answer"), ANSWERS.items(), ids=["schema", "regex", "choice", "lark"])
def test_the_answer_follows_its_grammar_after_the_reasoning(followed: str, answer: str) -> None:
    may_reason = grammar.after(lark_before_answer(THINK, False, {}), followed)
    reasoning = "<think>\nHm. </thi {1}\n</think>\n\n"
    assert follows(may_reason, ids(reasoning + answer)) == (True, True)
    assert follows(may_reason, ids(answer)) == (True, True)
    assert follows(may_reason, ids(reasoning[:-12] + answer)) == (True, False)  # still reasoning
    assert follows(may_reason, ids(reasoning + "!")) == (False, False)
    assert follows(may_reason, ids("Hm.")) == (False, False)


def test_the_prompt_may_have_begun_the_reasoning() -> None:
    followed = grammar.after(lark_before_answer(THINK, True, {}), next(iter(ANSWERS)))
    assert follows(followed, ids('Hm.</think>\n{"a": 1}')) == (True, True)
    assert follows(followed, ids('{"a": 1}')) == (True, False)


def test_an_answer_of_any_text_begins_behind_the_reasoning() -> None:
    """A grammar of calls in a text binds none that the model only thinks of."""
    schemas = {"f": {"type": "object", "properties": {}, "additionalProperties": False}}
    answer = text_and_calls_grammar(HERMES, schemas, True, {})
    followed = grammar.after(lark_before_answer(THINK, False, {}), answer)
    assert follows(followed, ids("<think>\nA <tool_call> or none?\n</think>\n\nNone.")) == (True, True)
    assert follows(followed, ids("<think>\nHm.\n</think>\n\n<tool_call> or none")) == (False, False)
    assert follows(followed, ids("<thin> air")) == (True, True)


NEVER = frozenset({300, 301, *DRY_RUN.eos_token_ids})


def allowed(followed: str, token_ids: list[int]) -> list[int]:
    words = Grammars(lambda: DRY_RUN, 320).start(followed).result().allowed(token_ids)
    assert words is not None
    return [token_id for token_id in range(320) if words[token_id // 32] >> (token_id % 32) & 1]


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
    assert follows(followed, [*thought, end, *b"Yes."]) == (True, True)
    opened, _ = lark_after_budget(THINK, True, SPECIAL, (num_tokens, NEVER))
    assert allowed(grammar.after(opened, grammar.lark(any_answer)), thought[1:]) == [end]
    strict = grammar.after(opened, grammar.regex("[a-c]"))
    assert follows(strict, [*thought[1:], end, *b"\na"]) == (True, True)
    assert follows(strict, [*thought[1:], end, *b"\nx"]) == (False, False)


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
    assert follows(followed, [*start, *b"final", message, *b"Yes."]) == (True, True)
    call = [*start, *b"commentary to=functions.f", message, *b"{}", special["<|call|>"]]
    assert follows(followed, call) == (True, True)
    final = lark_before_answer(HARMONY, False, special, budget)
    assert allowed(grammar.after(final, grammar.regex("[a-c]")), start) == [ord("f")]


def test_markers_may_be_special_tokens() -> None:
    followed = grammar.after(lark_before_answer(THINK, False, SPECIAL), grammar.regex("[a-c]"))
    assert follows(followed, [301, *ids("Hm. </think> a"), 300, *ids("\na")]) == (True, True)
    assert follows(followed, [*ids("<think>")]) == (False, False)


def test_an_answer_of_channels_follows_the_grammar_in_the_last_one() -> None:
    followed = grammar.after(lark_before_answer(HARMONY, False, {}), grammar.regex("[a-c]"))
    assert follows(followed, ids(f"{ANALYSIS}{FINAL}a")) == (True, True)
    assert follows(followed, ids(f"{FINAL}a")) == (True, True)
    assert follows(followed, ids("a")) == (False, False)
