"""Grammars of texts in which a JSON object without call markers is a call, or names no function.

The beginning of such a call, up to the end of the name, is one lexeme: a text that may begin the same way ends there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from common.grammar import grammar
from common.tools.tool_parser import Schema, alternatives

_ANY, _BLANKS = r"(?s:.*)", r"[ \t\r\n]*"
_BLANK = r"(\x20|\n[\x20\t]{0,16})?"
MAX_NAMES = (
    32  # above it, names are told apart by prefix: 64 whole ones take too many steps with a model's vocabulary
)
_ESCAPED_NAME = r"\\u00(2[dD]|3[0-9]|[4-7])"  # escaped letters of a function's name, which would hide it


def object_or_text(schemas: Mapping[str, Schema], several: str, tags: Sequence[str]) -> list[str]:
    """Return Lark rules of an answer that consists of such objects, or of a text that does not begin with one.

    several: Lark of further objects after the first. tags: Lark of what may precede it.
    """
    return [
        f"start: {' '.join(tags)} object{several} | TEXT",
        f"TEXT: /{_ANY}/ & ~/{_BLANKS}\\{{{_ANY}({_named(schemas)}){_ANY}/",
        *_object_rules(schemas, f"{_BLANK}\\{{"),
        *(f"arguments_{index}: {grammar.json_rule(schema)}" for index, schema in enumerate(schemas.values())),
    ]


def objects_in_text(
    schemas: Mapping[str, Schema],
    is_parallel: bool,
    begin: str,
    openings: Sequence[str],
    quoted: Callable[[str], str],
) -> list[str]:
    """Return Lark rules of a text with such objects at its beginning or after an opening, and `call` after `begin`.

    The caller adds the rules `call`, `arguments_0` and so on. After an object that is not a call, only calls may name
    a function, up to the end of the text.
    """
    opened, marker = _any_of(openings), _any_of([begin])
    if is_parallel:
        inside = "(before_call_inside call | open_inside object?)*"
        start = f"(before_call call | open object)* (TEXT | open {inside} TEXT_INSIDE)"
    else:
        inside = "open open_inside*"
        start = f"before_call call | {inside} (object | before_call_inside call | TEXT_INSIDE) | TEXT"
    return [
        f"start: {start}",
        "open[lazy]: OPEN",
        f"OPEN: /({_ANY}({opened}))?{_BLANKS}\\{{/ & ~/{_ANY}({marker}){_ANY}/",
        f"open_inside[suffix=/({opened}){_BLANKS}\\{{/]: TEXT_INSIDE",  # & would take many more steps here
        *(_before_call(f"before_call{where}", f"TEXT{where.upper()}", begin, quoted) for where in ("", "_inside")),
        f"TEXT: /{_ANY}/ & ~/{_ANY}({marker}){_ANY}/ & ~/({_ANY}({opened}))?{_BLANKS}\\{{{_ANY}/",
        f"TEXT_INSIDE: /{_ANY}/ & ~/{_ANY}({marker}|{_named(schemas)}){_ANY}/",
        *_object_rules(schemas, ""),
    ]


def _object_rules(schemas: Mapping[str, Schema], brace: str) -> list[str]:
    """Return Lark rules, with `object`, of calls that begin with `brace`; empty: after the brace."""
    kind = _BLANK.join(('"type"', ":", '"function"', ",", ""))  # which Llama 3.1 may write
    tail = _BLANK.join(("", ",", '"(parameters|arguments)"', ":", ""))
    rules = [alternatives(schemas, "object")]
    for index, name in enumerate(schemas):
        head = brace + _BLANK + _BLANK.join((f'({kind})?"name"', ":", f'"{re.escape(name)}"'))
        rules.append(f"object_{index}: /{head}/ /{tail}/ arguments_{index} /{_BLANK}\\}}/")
    return rules


def _named(schemas: Mapping[str, Schema]) -> str:
    """Return a regular expression of everything that may be read as a function's name."""
    names = "|".join(map(re.escape, schemas))
    if len(schemas) > MAX_NAMES:  # match the beginnings of names
        names = f"({'|'.join({re.escape(name[:4]): 0 for name in schemas})})[A-Za-z0-9_-]*"
    return rf'"name"{_BLANKS}:{_BLANKS}"({names})"|{_ESCAPED_NAME}'


def _before_call(rule: str, text: str, begin: str, quoted: Callable[[str], str]) -> str:
    """Return the rule of a text up to and including the marker."""
    marker = quoted(begin)
    return f"{rule}: {text} {marker}" if marker.startswith("<[") else f"{rule}[suffix={marker}]: {text}"


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(re.escape(text).replace("/", "\\/") for text in texts)
