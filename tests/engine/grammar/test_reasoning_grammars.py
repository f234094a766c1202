"""Answers that follow a grammar after their reasoning, whichever way the reasoning is written."""

from __future__ import annotations

import pytest

from common.grammar import grammar
from common.model_files import resolve_model
from common.reasoning.reasoning_format import HARMONY, THINK, lark_before_answer
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


def test_markers_may_be_special_tokens() -> None:
    followed = grammar.after(lark_before_answer(THINK, False, SPECIAL), grammar.regex("[a-c]"))
    assert follows(followed, [301, *ids("Hm. </think> a"), 300, *ids("\na")]) == (True, True)
    assert follows(followed, [*ids("<think>")]) == (False, False)


def test_an_answer_of_channels_follows_the_grammar_in_the_last_one() -> None:
    followed = grammar.after(lark_before_answer(HARMONY, False, {}), grammar.regex("[a-c]"))
    assert follows(followed, ids(f"{ANALYSIS}{FINAL}a")) == (True, True)
    assert follows(followed, ids(f"{FINAL}a")) == (True, True)
    assert follows(followed, ids("a")) == (False, False)
