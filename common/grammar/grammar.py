"""Grammars that an answer must follow: JSON schemas, regular expressions, choices, Lark grammars; uses llguidance.

A grammar is passed on as one string, `KIND:TEXT`. Routers check it; engines follow it (`engine/grammar/grammars.py`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from common.errors import InvalidRequestError
from common.grammar.json_schemas import followable, parsed_schema
from common.grammar.unique_items import UNIQUE

MAX_GRAMMAR_CHARS = 1 << 20
MAX_GBNF_CHARS = 64 * 1024  # converted at 10 us each
# Measured needs of schemas written by people, with a margin: docs/decisions/structured-outputs.md. Errors show no
# state.
LIMITS = LLParserLimits(
    max_items_in_row=500,
    step_max_items=10_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=200_000,
    max_lexer_states=8_000,
    verbose_errors=False,
)
# Without it, a matcher follows everything that a grammar forces before it returns the next token: a million bytes of
# `(x{1000}){1000}` at once, 3 s and 230 MB, which no limit bounds.
NO_FORCING = '%llguidance {"no_forcing": true}'
TOO_COMPLEX = "the grammar is too complex"
LIMIT_MESSAGES = (  # llguidance's message about a limit, and what users are told
    ("Unable to determine if regex is empty", "a pattern takes too long to compile"),
    ("initial lexer configuration", "its patterns take more than 500,000 steps to compile"),
    ("lexer precomputation failed", "its patterns take more than 500,000 steps to compile"),
    ("fuel exhausted", "its patterns take more than 500,000 steps to compile"),
    ("too many expressions", "its patterns take more than 200,000 steps for one token"),
    ("too many states", "its patterns have more than 8,000 states"),
    ("Too many items", "more than 10,000 ways to read one token"),
    ("Current row has", "more than 500 ways to go on at one position"),
    ("number of symbols", "more than 500,000 symbols"),
    ("schema too large", "its schema takes more than 50,000 steps to read"),
)
NOT_UNIQUE = (
    "uniqueItems is followed for strings, numbers, booleans and null, but not in structural tags, in calls of tools "
    "that are not JSON, or where an answer may be either calls or JSON"
)
NUM_CHECKED_BYTES = 96  # of an answer that a check generates
MARKS = frozenset(b'"{}[]:,')  # the check often chooses one of these, or it would stay inside strings
Marks = tuple[str, str]
NUM_IDS = 1 << 18  # more than models have
# Between JSON's tokens a blank, or a line break with indentation: if more were allowed, a small model would write
# blanks until max_tokens. coerce_one_of: oneOf, which pydantic writes for tagged unions, would be refused without it.
JSON_OPTIONS: Any = {"whitespace_pattern": r"\x20?|\x0A[\x20\x09]{0,32}", "coerce_one_of": True}
ESCAPES_BY_NAME = r"nrbtf\""  # so that each text has only one spelling
COMPACT_OPTIONS: Any = {"whitespace_flexible": False, "coerce_one_of": True}  # no blanks


def json_schema(schema: Mapping[str, Any] | str, whitespace_pattern: str | None = None) -> str:
    """Return the grammar of JSON texts that follow a schema, or its text. `$ref` finds definitions in the schema
    itself.

    whitespace_pattern: what may stand between JSON's tokens, once in each place; None: the one of JSON_OPTIONS.
    """
    value = parsed_schema(schema) if isinstance(schema, str) else schema
    if value is None:
        return f"json_schema:{schema}"
    written = dict(followable(value, marks_unique=True))
    options = {} if whitespace_pattern is None else {"whitespace_pattern": whitespace_pattern}
    text = json.dumps(written, separators=(",", ":"), ensure_ascii=False)  # without blanks, so that long ones fit
    if f'"{UNIQUE}"' in text:
        options["json_allowed_escapes"] = ESCAPES_BY_NAME
    return f"json_schema:{json.dumps({**written, 'x-guidance': options}) if options else text}"


def compact_json(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON texts without blanks that follow a schema."""
    rule = json_rule(followable(schema, marks_unique=True), COMPACT_OPTIONS)
    return with_places(lark(f"start: json\njson: {rule}"), {"": "json"})


def json_object() -> str:
    """Return the grammar of any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Return the grammar of texts that match a pattern completely; no look-around or back-references."""
    return f"regex:{pattern}"


def choice(texts: Sequence[str]) -> str:
    """Return the grammar of exactly these texts."""
    return lark("start: CHOICE\nCHOICE: " + "|".join(json.dumps(text) for text in texts))  # one token of the lexer


def lark(text: str) -> str:
    """Return a context-free grammar in Lark's syntax, whose first rule is `start`."""
    return f"lark:{text}"


def after(before: str, grammar: str, marks: Marks = ("", "")) -> str:
    """Return the grammar of texts in which a part allowed by the Lark rule `before` precedes one of `grammar`.

    marks: what begins that part, if the text does not begin with `grammar`'s, and what ends it. Empty: it has begun.
    """
    return f"after:{json.dumps([before, grammar, marks])}"


def with_places(grammar: str, places: Mapping[str, str]) -> str:
    """Return a Lark grammar with the texts that precede JSON whose items are compared, and the rules of this JSON."""
    return f"places:{json.dumps(places)}\n{grammar}" if f'"{UNIQUE}"' in grammar else grammar


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in llama.cpp's syntax, which vLLM accepts, rather than in Lark's."""
    return "::=" in text and not is_lark_syntax(text)


def gbnf(text: str) -> str:
    """Return a context-free grammar in GBNF, whose first rule is `root`. Raises InvalidRequestError."""
    if len(text) > MAX_GBNF_CHARS:
        raise InvalidRequestError(f"a grammar of more than {MAX_GBNF_CHARS} characters")
    try:
        return lark(gbnf_to_lark(text).removeprefix("%llguidance {}"))
    except Exception as error:  # noqa: BLE001 - the converter raises whatever it encounters, plain Exception, too
        raise InvalidRequestError(f"the grammar is not valid GBNF: {str(error)[:500]}") from None


def json_rule(schema: Mapping[str, Any], options: Any = JSON_OPTIONS) -> str:
    """Return Lark for the JSON texts that follow a schema."""
    written = followable(schema)
    if f'"{UNIQUE}"' in json.dumps(written):
        options = {**options, "json_allowed_escapes": ESCAPES_BY_NAME}
    return f"%json {json.dumps({**written, 'x-guidance': options})}"


def check_grammar(grammar: str) -> None:
    """Compile a grammar, and follow the beginning of an answer, with bytes instead of a model's tokens.

    Raises InvalidRequestError if it cannot be used. Most checks take 4 ms; hostile grammars take seconds or more, so
    services check in a process with limits (`router/grammar/grammar_checks.py`).
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"a grammar of more than {MAX_GRAMMAR_CHARS} characters")
    text = for_llguidance(grammar)
    matcher = LLMatcher(_byte_tokens(), text, log_level=0, limits=LIMITS)
    error = matcher.get_error() or _follow(matcher)
    if "unknown special token" in error:  # the model may have it
        error = LLMatcher.validate_grammar(text, limits=LIMITS)
    if error and not error.startswith("WARNING"):
        raise InvalidRequestError(grammar_error(error))


def _follow(matcher: LLMatcher) -> str:
    """Follow one random answer for NUM_CHECKED_BYTES or to its end. Return the error, if one occurs."""
    rng = random.Random(0)
    for _ in range(NUM_CHECKED_BYTES):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            break
        allowed = [byte for byte in range(256) if mask >> byte & 1] or [(mask & -mask).bit_length() - 1]
        marks = [byte for byte in allowed if byte in MARKS]
        if not matcher.try_consume_tokens([rng.choice(marks if marks and rng.random() < 0.5 else allowed)]):
            break
    return matcher.get_error()


def grammar_error(message: str) -> str:
    """Explain llguidance's error about an unusable grammar in a user's words."""
    if "NoExtension" in message:
        return "the grammar allows no answer, or leads to where nothing may follow: a cycle of references?"
    for pattern, limit in LIMIT_MESSAGES:
        if pattern in message:
            return f"{TOO_COMPLEX}: {limit}"
    if 'Unimplemented keys: ["uniqueItems"]' in message:
        return f"the grammar is not valid: {NOT_UNIQUE}"
    return f"the grammar is not valid: {message.removesuffix('<non-verbose/>').strip()[:500]}"


class _ByteVocabulary:
    """Bytes, an end token, and ids without text, since grammars may use the ids of a model's special tokens."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)

    def __init__(self) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *[b""] * (NUM_IDS - 257)]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _byte_tokens() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_ByteVocabulary()), eos_token=256)


def for_llguidance(grammar: str) -> str:
    """Return the grammar in llguidance's format. Raises InvalidRequestError."""
    before = ""
    kind, _, text = grammar.partition(":")
    try:
        if kind == "after":
            before, grammar, _ = json.loads(text)
            kind, _, text = grammar.partition(":")
        if kind == "places":
            kind, _, text = text.partition("\n")[2].partition(":")
        match kind:
            case "json_schema":
                return _unforced(
                    before, "json_schema", LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
                )
            case "regex":
                return _unforced(before, "regex", LLMatcher.grammar_from_regex(text))
            case "lark" if before:
                return _unforced(before, "lark", json.dumps({"grammars": [{"name": "lark", "lark_grammar": text}]}))
            case "lark":
                return f"{text}\n{NO_FORCING}"
    except ValueError as error:
        raise InvalidRequestError(f"the grammar is not valid: {str(error)[:500]}") from None
    raise InvalidRequestError("a grammar of an unknown kind")


def _unforced(before: str, name: str, compiled: str) -> str:
    """Put a grammar that forces nothing first in the list: `before`, if given, then `name`."""
    start = f"start: before @{name}\n{before}" if before else f"start: @{name}"
    listed = json.loads(compiled)
    listed["grammars"].insert(0, {"lark_grammar": f"{start}\n{NO_FORCING}"})
    return json.dumps(listed)
