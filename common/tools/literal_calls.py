"""Calls with keywords and literals: `[get_weather(city="Oslo"), get_time()]` of Llama-4 and Gemma-3, and
FunctionGemma's `call:get_weather{city:<escape>Oslo<escape>}`.

Sources: the chat templates of these models and of vLLM's examples, and Google's description of FunctionGemma's
format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from common.grammar import grammar
from common.tools.literal_reader import LiteralCallReader, Literals
from common.tools.python_reader import PythonCallReader
from common.tools.tagged_reader import is_text
from common.tools.tool_parser import CallReader, Schema, alternatives, markers_in

MAX_RULE_CHARS = 200
TOOL_CODE = ("```tool_code", "```")  # Gemma also writes calls in such a block, one per line, possibly within print()
Quoted = Callable[[str], str]
_PLAIN = frozenset({
    "type", "properties", "required", "additionalProperties", "title", "description", "items", "enum", "const",
    "default", "examples", "$schema", "$defs",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class LiteralCalls:
    """Calls of the form `before`, name, `opener`, keywords with values, `closer`, with `between` between calls."""

    begin: str  # marker before each call; empty: the answer begins with `first`
    end: str  # after each call, or after the last call if `begin` is empty
    first: str  # before the first name
    next: str  # before further names
    opener: str
    closer: str
    assign: str  # between a keyword and its value
    comma: str  # between two arguments
    quote: str  # around strings; empty: strings of JSON or Python

    @property
    def opening(self) -> str:
        return ""

    @property
    def answer_opening(self) -> str:
        return ""

    @property
    def separator(self) -> str:
        return "" if self.begin else self.next

    @property
    def variants(self) -> tuple[tuple[str, str], ...]:
        return () if self.begin else (TOOL_CODE,)

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    @property
    def markers(self) -> tuple[str, ...]:
        return markers_in(self.begin, self.quote, self.end)

    @property
    def silent(self) -> tuple[str, ...]:
        return () if self.begin else ("<|python_start|>", "<|python_end|>")

    def reader(self, functions: Mapping[str, Schema], is_first: bool, begin: str) -> CallReader:
        if self.quote:
            return LiteralCallReader(Literals(self.first, self.opener, self.quote, self.end), functions)
        if begin == TOOL_CODE[0]:
            return PythonCallReader("", "print", functions)
        return PythonCallReader(self.first if is_first else self.next, "", functions)

    def before_arguments(self, names: Iterable[str]) -> None:
        return None

    def lark(self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Quoted) -> list[str]:
        if self.begin:
            calls = f"call{' call*' if is_parallel else ''}"
        else:
            several = f' ("{self.next} " call)*' if is_parallel else ""
            calls = f"{quoted(self.first)} call{several} {quoted(self.end)}"
        rules = [f"calls: {calls}", alternatives(schemas)]
        before, after = (self.begin + self.first, self.end) if self.begin else ("", "")
        for index, (name, schema) in enumerate(schemas.items()):
            inside = self._arguments(f"value_{index}", schema, schema, rules, quoted)
            begin, end = quoted(f"{before}{name}{self.opener}"), quoted(self.closer + after)
            rules += [f"call_{index}: {begin} inside_{index}", f"inside_{index}: {inside} {end}"]
        return rules

    def lark_unmarked(self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Quoted) -> list[str] | None:
        if self.begin:
            return None
        _, *rules = self.lark(schemas, is_parallel, quoted)
        blanks, names = r"[\s\x1c-\x1f]*", "|".join(map(re.escape, schemas))
        first, opener = re.escape(self.first), re.escape(self.opener)
        several = f' ("{self.next} " call)*' if is_parallel else ""
        before, after = (f"{each}?" if each.startswith("<[") else "" for each in map(quoted, self.silent))
        line = r'"\n" ("print(" call ")" | call)'
        text = rf'(code ({line})+ "\n```")* TEXT' if is_parallel else f"code {line} | TEXT"
        rules += [
            f"start: {before} first{several} {quoted(self.end)} {after} | {text}",
            f"code[suffix={json.dumps(TOOL_CODE[0])}]: TEXT",
            f"first: {' | '.join(f'first_{index}' for index in range(len(schemas)))}",
            f"TEXT: NO_LIST & ~/(?s:.*){TOOL_CODE[0]}(?s:.*)/",
            f"NO_LIST: /(?s:.*)/ & ~/{blanks}{first}{blanks}({names}){blanks}{opener}(?s:.*)/",
        ]
        # The head up to the arguments is one lexeme, so that a text that may begin the same way ends where it is
        # complete.
        for index, name in enumerate(schemas):
            rules.append(f"first_{index}: /[ \\n]{{0,4}}{first}{re.escape(name)}{opener}/ inside_{index}")
        return rules

    def _arguments(self, rule: str, schema: Schema, root: Schema, rules: list[str], quoted: Quoted) -> str:
        """Return Lark for keywords with values in the schema's order; add the rules that it needs.

        Raises InvalidRequestError for a schema with more than properties and required ones.
        """
        if set(schema) - _PLAIN:
            message = "this model's calls cannot be required: their parameters have to be plain properties"
            raise InvalidRequestError(message, "tools")
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            value = self._value(f"{rule}_any", {}, root, rules, quoted)
            item = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {quoted(self.assign)} {value}"
            return f"({item} ({quoted(self.comma)} {item})*)?"
        listed, required = schema.get("properties", {}), schema.get("required", ())
        items = []
        for place, (key, wanted) in enumerate(listed.items()):
            value = self._value(f"{rule}_{place}", wanted, root, rules, quoted)
            items.append((f"{quoted(key + self.assign)} {value}", key in required))
        # `rest_i`: what may follow an argument. The first argument written has no comma before it.
        following, choices = "", []
        for place in reversed(range(len(items))):
            item, is_required = items[place]
            choices.append((place, f"{item} {following}"))
            rules.append(
                f"{rule}_rest_{place}: ({quoted(self.comma)} {item}){'' if is_required else '?'} {following}"
            )
            following = f"{rule}_rest_{place}"
        num_optional = next((place for place, (_, needed) in enumerate(items) if needed), len(items))
        firsts = [text for place, text in reversed(choices) if place <= num_optional]
        is_optional = num_optional == len(items)
        return f"({' | '.join(firsts)}){'?' if is_optional else ''}" if firsts else ""

    def _value(self, rule: str, schema: Any, root: Schema, rules: list[str], quoted: Quoted) -> str:
        """Add the rules of a value; return the name of its rule."""
        shared = {"$defs": root["$defs"]} if "$defs" in root else {}
        if self.quote and isinstance(schema, Mapping) and "$ref" in schema:
            schema = _resolved(schema["$ref"], root)
        if len(rule) > MAX_RULE_CHARS:
            raise InvalidRequestError("a schema that is nested too deep, or in itself", "tools")
        if not self.quote or not isinstance(schema, Mapping):
            inside = grammar.json_rule({**schema, **shared} if isinstance(schema, Mapping) else {})
        elif "enum" in schema or "const" in schema:
            constants = schema["enum"] if "enum" in schema else [schema["const"]]
            inside = " | ".join(self._constant(each, quoted) for each in constants)
        elif is_text(schema, schema):
            inside = self._text(rule, rules, quoted)
        elif variants := schema.get("anyOf") or schema.get("oneOf") or _types(schema):
            names = [
                self._value(f"{rule}_{place}", {**shared, **each}, root, rules, quoted)
                for place, each in enumerate(variants)
            ]
            inside = " | ".join(names)
        elif schema.get("type") in ("integer", "number", "boolean", "null"):
            inside = grammar.json_rule({**schema, **shared})
        elif schema.get("type") == "array" and not set(schema) - _PLAIN:
            item = self._value(f"{rule}_item", schema.get("items", {}), root, rules, quoted)
            inside = f'"[" ({item} ({quoted(self.comma)} {item})*)? "]"'
        elif schema.get("type") == "object":
            inside = f'"{{" {self._arguments(rule, schema, root, rules, quoted)} "}}"'
        else:
            message = "this model's calls cannot be required: values have to be plain texts, numbers, lists, objects"
            raise InvalidRequestError(message, "tools")
        rules.append(f"{rule}: {inside}")
        return rule

    def _constant(self, value: Any, quoted: Quoted) -> str:
        if not isinstance(value, str):
            return json.dumps(json.dumps(value))
        return f"{quoted(self.quote)} {json.dumps(value)} {quoted(self.quote)}"

    def _text(self, rule: str, rules: list[str], quoted: Quoted) -> str:
        if quoted(self.quote).startswith("<["):  # a special token, which no text contains
            return f"{quoted(self.quote)} /(?s:.*)/ {quoted(self.quote)}"
        rules.append(f"{rule}_text[suffix={json.dumps(self.quote)}]: /(?s:.*)/")
        return f"{quoted(self.quote)} {rule}_text"


def _resolved(reference: Any, root: Schema) -> Any:
    """Return the definition with that name; other references cannot be followed."""
    return root.get("$defs", {}).get(str(reference).removeprefix("#/$defs/"), {"$ref": reference})


def _types(schema: Schema) -> list[Schema]:
    """Return one schema for each type, if the schema lists several."""
    types = schema.get("type")
    return [{**schema, "type": each} for each in types] if isinstance(types, list) else []


# Llama-4 may write this between <|python_start|> and <|python_end|>, special tokens that no text shows.
PYTHONIC = LiteralCalls(
    begin="", end="]", first="[", next=",", opener="(", closer=")", assign="=", comma=", ", quote=""
)
FUNCTION_GEMMA = LiteralCalls(
    begin="<start_function_call>", end="<end_function_call>", first="call:", next="", opener="{", closer="}",
    assign=":", comma=",", quote="<escape>",
)  # fmt: skip
