"""Calls that are JSON objects with a name and arguments, between markers or without."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.grammar import grammar
from common.tools.call_reader import CallReader
from common.tools.tool_parser import Schema, alternatives, markers_in

_ESCAPED_NAME = r"\\u00(2[dD]|3[0-9]|[4-7])"  # JSON of a letter that a function's name may have, which hides it


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`opening`, then calls: `begin`, a JSON object, `end`; between two calls `between`; at the end `closing`."""

    begin: str  # empty: an answer that begins with the object is a call
    end: str
    space: str = ""  # between the object and the markers
    arguments: str = "arguments"  # the key of the arguments
    between: str = ""  # calls of a forced answer; empty: it is one call
    opening: str = ""
    closing: str = ""
    lead: str = ""  # characters that may come before the first object
    separator: str = ""  # characters that may come before another one, where no marker does
    variants: tuple[tuple[str, str], ...] = ()
    silent: tuple[str, ...] = ()  # the token that may come before an object without a marker

    @property
    def markers(self) -> tuple[str, ...]:
        return markers_in(self.begin, self.end)

    @property
    def answer_opening(self) -> str:
        return ""

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    def reader(self, functions: Mapping[str, Schema], is_first: bool) -> CallReader:
        return CallReader(functions, self.end[:1], self.lead if is_first else self.separator)

    def lark(self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Callable[[str], str]) -> list[str]:
        several = f" ({quoted(self.between)} call)*" if is_parallel and self.between else ""
        rules = [f"calls: {quoted(self.opening)} call{several} {quoted(self.closing)}", alternatives(schemas)]
        begin, end = ("", "") if self.opening else (self.begin, self.end)
        for index, (name, schema) in enumerate(schemas.items()):
            before = quoted(f'{begin}{self.space}{{"name": {json.dumps(name)}, "{self.arguments}": ')
            rules.append(f"call_{index}: {before} arguments_{index} {quoted('}' + self.space + end)}")
            rules.append(f"arguments_{index}: {grammar.json_rule(schema)}")
        return rules

    def lark_unmarked(
        self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Callable[[str], str]
    ) -> list[str] | None:
        if self.begin:
            return None
        # What begins an object is one lexeme with the name: a text, which may begin so, ends where that is complete.
        names, blank, any_blanks = "|".join(map(re.escape, schemas)), r"(\x20|\n[\x20\t]{0,16})?", r"[ \t\r\n]*"
        tags = [f"{token}?" for token in map(quoted, self.silent) if token.startswith("<[")]
        named = rf'"name"{any_blanks}:{any_blanks}"({names})"'
        rules = [
            f"start: {' '.join(tags)} calls | TEXT",
            rf"calls: call{f' (/{any_blanks}[{self.separator}]/ call)*' if is_parallel else ''}",
            rf"TEXT: /(?s:.*)/ & ~/{any_blanks}\{{(?s:.*)({named}|{_ESCAPED_NAME})(?s:.*)/",
            alternatives(schemas),
        ]
        for index, (name, schema) in enumerate(schemas.items()):
            kind = blank.join(('"type"', ":", '"function"', ",", ""))  # which Llama 3.1 may write
            head = blank.join(("", "\\{", f'({kind})?"name"', ":", f'"{re.escape(name)}"'))
            tail = blank.join(("", ",", '"(parameters|arguments)"', ":", ""))
            rules.append(f"call_{index}: /{head}{tail}/ arguments_{index} /{blank}\\}}/")
            rules.append(f"arguments_{index}: {grammar.json_rule(schema)}")
        return rules


# And Qwen2.5 and Qwen3. Qwen2.5-Coder, and models with a generic prompt, leave the markers out or write others.
_HERMES_VARIANTS = (("```json", "```"), ("<tools>", "</tools>"), ("", ""))
HERMES = JsonCalls("<tool_call>", "</tool_call>", space="\n", between="\n", variants=_HERMES_VARIANTS)
LLAMA3_JSON = JsonCalls("", "", arguments="parameters", separator=";", silent=("<|python_tag|>",))
MISTRAL_LIST = JsonCalls(
    "[TOOL_CALLS]", "", between=", ", opening="[TOOL_CALLS][", closing="]", lead="[", separator=",]"
)
