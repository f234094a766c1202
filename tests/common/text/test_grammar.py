"""Grammars that cannot be used are refused, soon and with the reason."""

from __future__ import annotations

import re
import time

import pytest

from common.errors import InvalidRequestError
from common.text import grammar


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
