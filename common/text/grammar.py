"""Grammars that an answer must follow: JSON schemas, regular expressions, choices, Lark grammars, over llguidance.

A grammar travels as one string, `KIND:TEXT`. Routers check it; engines follow it (`engine/grammars.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from common.errors import InvalidRequestError
from common.text.json_schemas import parsed_schema, without_unknown_formats

MAX_GRAMMAR_CHARS = 64 * 1024  # 0.3 s of compiling at most
# An ambiguous grammar takes up to 30 ms a token, and fails soon; without limits it is seconds. A lexer's states take
# 1 kB each; schemas have hundreds. Errors show no state.
LIMITS = LLParserLimits(max_items_in_row=500, step_max_items=10_000, max_lexer_states=20_000, verbose_errors=False)
# Between JSON's tokens a blank, or a new line and its indentation: a small model that may write more does until
# max_tokens. And oneOf, which pydantic makes of tagged unions, would be refused.
JSON_OPTIONS: Any = {"whitespace_pattern": r"\x20?|\x0A[\x20\x09]{0,32}", "coerce_one_of": True}
COMPACT_OPTIONS: Any = {"whitespace_flexible": False, "coerce_one_of": True}  # no blanks at all


def json_schema(schema: Mapping[str, Any] | str) -> str:
    """The grammar of JSON texts that a schema, or its text, allows. `$ref` reaches what the schema itself defines."""
    value = parsed_schema(schema) if isinstance(schema, str) else schema
    return f"json_schema:{schema if value is None else json.dumps(without_unknown_formats(value))}"


def compact_json(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON texts that a schema allows, without blanks."""
    return lark(f"start: {json_rule(schema, COMPACT_OPTIONS)}")


def json_object() -> str:
    """The grammar of any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """The grammar of texts that match as a whole; without look-around and back-references."""
    return f"regex:{pattern}"


def choice(texts: Sequence[str]) -> str:
    """The grammar of these texts and no others."""
    return lark("start: CHOICE\nCHOICE: " + "|".join(json.dumps(text) for text in texts))  # one token of a lexer


def lark(text: str) -> str:
    """A context-free grammar in Lark's syntax, with `start` as its first rule."""
    return f"lark:{text}"


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in the syntax of llama.cpp, which vLLM takes, and not in Lark's."""
    return "::=" in text and not is_lark_syntax(text)


def gbnf(text: str) -> str:
    """A context-free grammar in GBNF, with `root` as its first rule. Raises InvalidRequestError."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"a grammar of more than {MAX_GRAMMAR_CHARS} characters")
    try:
        return lark(gbnf_to_lark(text).removeprefix("%llguidance {}"))
    except Exception as error:  # noqa: BLE001 - the converter raises what it comes upon, plain Exception, too
        raise InvalidRequestError(f"the grammar is not valid GBNF: {str(error)[:500]}") from None


def json_rule(schema: Mapping[str, Any], options: Any = JSON_OPTIONS) -> str:
    """What stands in a Lark grammar for the JSON texts that a schema allows."""
    return f"%json {json.dumps({**without_unknown_formats(schema), 'x-guidance': options})}"


def check_grammar(grammar: str) -> None:
    """Raise InvalidRequestError for a grammar that cannot be used. Most take under a millisecond."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"a grammar of more than {MAX_GRAMMAR_CHARS} characters")
    error = LLMatcher.validate_grammar(for_llguidance(grammar), limits=LIMITS)
    if error and not error.startswith("WARNING"):
        raise InvalidRequestError(f"the grammar is not valid: {error.strip()[:500]}")


def for_llguidance(grammar: str) -> str:
    """The grammar as llguidance takes it. Raises InvalidRequestError."""
    kind, _, text = grammar.partition(":")
    try:
        match kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            case "regex":
                return LLMatcher.grammar_from_regex(text)
            case "lark":
                return LLMatcher.grammar_from_lark(text)
    except ValueError as error:
        raise InvalidRequestError(f"the grammar is not valid: {str(error)[:500]}") from None
    raise InvalidRequestError("a grammar of an unknown kind")
