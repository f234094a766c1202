"""Calls whose arguments are tags with values, as Qwen3-Coder and GLM write them. The schema gives the types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from common.grammar import grammar
from common.tools.tagged_reader import COMBINED, TaggedCallReader, Tags, is_text
from common.tools.tool_parser import Schema, alternatives, markers_in


@dataclass(frozen=True, slots=True)
class TaggedCalls(Tags):
    """`begin`, then a call as `Tags` describes it."""

    space: str = "\n"  # between tags
    begin: str = "<tool_call>"

    @property
    def markers(self) -> tuple[str, ...]:
        return markers_in(self.begin, *self.key, self.value, self.value_end, self.call_end, self.end)

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    @property
    def variants(self) -> tuple[tuple[str, str], ...]:
        return ()

    @property
    def opening(self) -> str:
        return ""

    @property
    def answer_opening(self) -> str:
        return ""

    @property
    def separator(self) -> str:
        return ""

    @property
    def silent(self) -> tuple[str, ...]:
        return ()

    def lark_unmarked(
        self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Callable[[str], str]
    ) -> list[str] | None:
        return None

    def reader(self, functions: Mapping[str, Schema], is_first: bool, begin: str) -> TaggedCallReader:
        return TaggedCallReader(self, functions)

    def before_arguments(self, names: Iterable[str]) -> None:
        return None

    def lark(self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Callable[[str], str]) -> list[str]:
        several = ' ("\\n" call)*' if is_parallel else ""
        # When read, a value ends at this tag if the right tag follows, so values must not contain it.
        no_tag = "~/(?s:.*)" + self.value_end.replace("/", "\\/") + "(?s:.*)/"
        rules = [f"calls: call{several}", f"VALUE: /(?s:.*)/ & {no_tag}", alternatives(schemas)]
        for index, (name, schema) in enumerate(schemas.items()):
            if any(word in schema for word in COMBINED):
                message = (
                    f"this model's calls of {name} cannot be required: its parameters have to be plain properties"
                )
                raise InvalidRequestError(message, "tools")
            parameters = []
            for place, (key, value) in enumerate(schema.get("properties", {}).items()):
                rule = f"value_{index}_{place}"
                before = quoted(f"{self.key[0]}{key}{self.key[1]}{self.value}{self.trim}")
                is_needed = key in schema.get("required", ())
                parameters.append(f"({before} {rule} {quoted(self.space)}){'' if is_needed else '?'}")
                rules += self._value_rules(rule, schema, value, quoted)
            begin = quoted(f"{self.begin}{self.name[0]}{name}{self.name[1]}")
            if "properties" not in schema and schema.get("additionalProperties") is not False:  # any parameters
                key, value = quoted(self.key[0]), quoted(f"{self.key[1]}{self.value}{self.trim}")
                parameters.append(f"({key} /[^<>]{{1,64}}/ {value} value_{index} {quoted(self.space)})*")
                rules += self._value_rules(f"value_{index}", {}, {}, quoted)
            end = quoted(f"{self.call_end}{self.space if self.end else ''}{self.end}")
            rules.append(f"call_{index}: {begin} {' '.join(parameters)} {end}")
        return rules

    def _value_rules(self, rule: str, schema: Schema, value: Any, quoted: Callable[[str], str]) -> list[str]:
        end = self.trim + self.value_end
        if not is_text(schema, value):
            shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
            return [f"{rule}: {rule}_json {quoted(end)}", f"{rule}_json: {grammar.json_rule({**value, **shared})}"]
        if texts := value.get("enum") or ([value["const"]] if "const" in value else []):
            return [f"{rule}: ({' | '.join(map(json.dumps, texts))}) {quoted(end)}"]
        if quoted(self.value_end).startswith("<["):  # a special token, which no text contains
            return [f"{rule}: VALUE {quoted(end)}"]
        return [f"{rule}[suffix={json.dumps(end)}]: VALUE"]


QWEN3_CODER = TaggedCalls(
    ("\n<function=", ">\n"), ("<parameter=", ">"), "", "</parameter>", "</function>", "</tool_call>", trim="\n"
)
GLM = TaggedCalls(("", "\n"), ("<arg_key>", "</arg_key>"), "\n<arg_value>", "</arg_value>", "</tool_call>", "")
