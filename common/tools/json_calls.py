"""Calls that are JSON objects with a name and arguments, with or without markers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from common.grammar import grammar
from common.tools.call_reader import CallReader
from common.tools.object_calls import object_or_text, objects_in_text
from common.tools.tool_parser import Schema, alternatives, markers_in


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`opening`, then calls of the form `begin`, JSON object, `end`, with `between` between them; last `closing`."""

    begin: str  # empty: an answer that begins with an object is a call
    end: str
    space: str = ""  # between the object and the markers
    arguments: str = "arguments"  # the key of the arguments
    between: str = ""  # between the calls of a forced answer; empty: it is a single call
    opening: str = ""
    closing: str = ""
    lead: str = ""  # characters that may come before the first object
    separator: str = ""  # characters that may precede another object, where no marker does
    variants: tuple[tuple[str, str], ...] = ()
    silent: tuple[str, ...] = ()  # token that may precede an object without a marker

    @property
    def markers(self) -> tuple[str, ...]:
        return markers_in(self.begin, self.end)

    @property
    def answer_opening(self) -> str:
        return ""

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    def reader(self, functions: Mapping[str, Schema], is_first: bool, begin: str) -> CallReader:
        return CallReader(functions, self.end[:1], self.lead if is_first else self.separator)

    def before_arguments(self, names: Iterable[str]) -> Iterable[str]:
        return [f'{{"name": {json.dumps(name)}, "{self.arguments}": ' for name in names]

    def lark(self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Callable[[str], str]) -> list[str]:
        several = f" ({quoted(self.between)} call)*" if is_parallel and self.between else ""
        rules = [f"calls: {quoted(self.opening)} call{several} {quoted(self.closing)}", alternatives(schemas)]
        begin, end = ("", "") if self.opening else (self.begin, self.end)
        for index, (before, schema) in enumerate(zip(self.before_arguments(schemas), schemas.values(), strict=True)):
            start = quoted(begin + self.space + before)
            rules.append(f"call_{index}: {start} arguments_{index} {quoted('}' + self.space + end)}")
            rules.append(f"arguments_{index}: {grammar.json_rule(schema)}")
        return rules

    def lark_unmarked(
        self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Callable[[str], str]
    ) -> list[str] | None:
        if self.variants:
            _, *rules = self.lark(schemas, False, lambda text: quoted(text.removeprefix(self.begin)))
            openings = [marker for marker, _ in self.variants if marker]
            return [*objects_in_text(schemas, is_parallel, self.begin, openings, quoted), *rules]
        if self.begin:
            return None
        tags = [f"{token}?" for token in map(quoted, self.silent) if token.startswith("<[")]
        several = f" (/[ \\t\\r\\n]*[{self.separator}]/ object)*" if is_parallel else ""
        return object_or_text(schemas, several, tags)


# Also Qwen2.5 and Qwen3. Qwen2.5-Coder and models with a generic prompt omit the markers or write others.
_HERMES_VARIANTS = (("```json", "```"), ("<tools>", "</tools>"), ("", ""))
HERMES = JsonCalls("<tool_call>", "</tool_call>", space="\n", between="\n", variants=_HERMES_VARIANTS)
LLAMA3_JSON = JsonCalls("", "", arguments="parameters", separator=";", silent=("<|python_tag|>",))
MISTRAL_LIST = JsonCalls(
    "[TOOL_CALLS]", "", between=", ", opening="[TOOL_CALLS][", closing="]", lead="[", separator=",]"
)
