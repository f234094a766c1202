"""Unusable grammars are refused quickly and with the reason."""

from __future__ import annotations

import re
import time

import pytest

from common.errors import InvalidRequestError
from common.grammar import grammar

RULES = "".join(f'\nr{i}: "{i}"' for i in range(1500))
CYCLE = 'json_schema:{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("regex:(", "unclosed group"),
        ("regex:(?=a)b", "look-around"),
        (r"regex:(a)\1", "backreferences"),
        ("json_schema:{", "EOF"),
        ("json_schema:[]", "object"),
        ('json_schema:{"type": "nope"}', "nope"),
        ('json_schema:{"$ref": "http://127.0.0.1:9/x.json"}', "does not fetch"),
        ('json_schema:{"$ref": "#/$defs/none"}', "none"),
        ("lark:start: x", "unknown name"),
        ("xml:<a/>", "unknown kind"),
        ('json_schema:{"$ref": "#"}', "no answer"),
        (CYCLE, "cycle"),
        (
            'json_schema:{"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}',
            "cycle",
        ),
        ("lark:start: " + " | ".join(f'"a" r{i}' for i in range(1500)) + RULES, "more than 500 ways to go on"),
        ('lark:{"grammars": [{"lark_grammar": "start: /a/"}]}', "not valid"),
        ("regex:" + "a" * grammar.MAX_GRAMMAR_CHARS, "characters"),
    ],
)
def test_what_cannot_be_used_is_refused_soon(text: str, reason: str) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=re.escape(reason)):
        grammar.check_grammar(text)
    assert time.monotonic() - began < 10.0


def test_a_deep_schema_is_refused() -> None:
    depth = 5_000
    text = '{"type":"array","items":' * depth + '{"type":"string"}' + "}" * depth
    with pytest.raises(InvalidRequestError):
        grammar.check_grammar(f"json_schema:{text}")


def test_what_a_grammar_forces_is_not_followed_ahead() -> None:
    """Following a million forced bytes took seconds and hundreds of megabytes."""
    began = time.thread_time()
    grammar.check_grammar("regex:(x{1000}){1000}")
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize("text", ['<[151657]> "{" <[151658]>', '<tool_call> "a"'])
def test_special_tokens_are_the_models_affair(text: str) -> None:
    grammar.check_grammar(grammar.lark(f"start: {text}"))


def test_the_limit_of_a_large_schema_is_named() -> None:
    items = [{"type": "integer"}] * 17_000
    large = grammar.json_schema({"type": "array", "prefixItems": items, "minItems": len(items), "items": False})
    with pytest.raises(InvalidRequestError, match="too complex: its schema takes more than 50,000 steps"):
        grammar.check_grammar(large)


def test_what_follows_a_special_token_is_checked() -> None:
    with pytest.raises(InvalidRequestError, match="more than 500 ways"):
        grammar.check_grammar("lark:start: <[151657]> x\nx: " + " | ".join(f'"a" r{i}' for i in range(1500)) + RULES)
