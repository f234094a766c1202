"""Grammars of texts in which a JSON object without the marker of calls is a call, or names no function.

What such a call begins with is one lexeme up to the name's end: a text, which may begin so, ends there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from common.grammar import grammar
from common.tools.tool_parser import Schema, alternatives

_ANY, _BLANKS = r"(?s:.*)", r"[ \t\r\n]*"
_BLANK = r"(\x20|\n[\x20\t]{0,16})?"
MAX_NAMES = (
    32  # told apart from a text letter by letter: with 64, and a model's vocabulary, that takes too many steps
)
_ESCAPED_NAME = r"\\u00(2[dD]|3[0-9]|[4-7])"  # JSON of a letter that a function's name may have, which hides it


def object_or_text(schemas: Mapping[str, Schema], several: str, tags: Sequence[str]) -> list[str]:
    """Return Lark rules of an answer that is such objects, or a text that does not begin with one.

    several: Lark of more objects after the first. tags: Lark of what may come before it.
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

    The rules `call` and `arguments_0` and so on are another's. From an object on that is no call, up to the text's
    end, only calls name a function.
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
        f"open_inside[suffix=/({opened}){_BLANKS}\\{{/]: TEXT_INSIDE",  # where & would take many more steps
        *(_before_call(f"before_call{where}", f"TEXT{where.upper()}", begin, quoted) for where in ("", "_inside")),
        f"TEXT: /{_ANY}/ & ~/{_ANY}({marker}){_ANY}/ & ~/({_ANY}({opened}))?{_BLANKS}\\{{{_ANY}/",
        f"TEXT_INSIDE: /{_ANY}/ & ~/{_ANY}({marker}|{_named(schemas)}){_ANY}/",
        *_object_rules(schemas, ""),
    ]


def _object_rules(schemas: Mapping[str, Schema], brace: str) -> list[str]:
    """Return Lark rules, `object` among them, of calls from that brace on, or from after it."""
    kind = _BLANK.join(('"type"', ":", '"function"', ",", ""))  # which Llama 3.1 may write
    tail = _BLANK.join(("", ",", '"(parameters|arguments)"', ":", ""))
    rules = [alternatives(schemas, "object")]
    for index, name in enumerate(schemas):
        head = brace + _BLANK + _BLANK.join((f'({kind})?"name"', ":", f'"{re.escape(name)}"'))
        rules.append(f"object_{index}: /{head}/ /{tail}/ arguments_{index} /{_BLANK}\\}}/")
    return rules


def _named(schemas: Mapping[str, Schema]) -> str:
    """Return the regular expression of all that may be read as a function's name."""
    names = "|".join(map(re.escape, schemas))
    if len(schemas) > MAX_NAMES:  # what begins like one
        names = f"({'|'.join({re.escape(name[:4]): 0 for name in schemas})})[A-Za-z0-9_-]*"
    return rf'"name"{_BLANKS}:{_BLANKS}"({names})"|{_ESCAPED_NAME}'


def _before_call(rule: str, text: str, begin: str, quoted: Callable[[str], str]) -> str:
    """Return the rule of a text with the marker that ends it."""
    marker = quoted(begin)
    return f"{rule}: {text} {marker}" if marker.startswith("<[") else f"{rule}[suffix={marker}]: {text}"


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(re.escape(text).replace("/", "\\/") for text in texts)
