"""Calls whose arguments are tags with values, as Qwen3-Coder and GLM write them. Types are those of the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from common.grammar import grammar
from common.text.stop_strings import num_begun
from common.tools.tool_parser import Schema, alternatives, markers_in

MAX_TAG_CHARS = 256
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as some models write them
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref")


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """`begin`, `name` with a function's name, then parameters: `key` with its name, `value`, a value, `value_end`."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: str  # between a key and its value
    value_end: str
    call_end: str  # after the last parameter
    end: str  # a marker after that; empty: none
    trim: str = ""  # around a value
    space: str = "\n"  # between tags
    begin: str = "<tool_call>"

    @property
    def markers(self) -> tuple[str, ...]:
        return markers_in(self.begin, *self.key, self.value, self.value_end, self.call_end, self.end)

    @property
    def after_value(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.key[0], self.call_end, self.end)))

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

    def lark(self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Callable[[str], str]) -> list[str]:
        several = ' ("\\n" call)*' if is_parallel else ""
        # A tag in a value is the end of it where it is read, if the right one follows.
        no_tag = "~/(?s:.*)" + self.value_end.replace("/", "\\/") + "(?s:.*)/"
        rules = [f"calls: call{several}", f"VALUE: /(?s:.*)/ & {no_tag}", alternatives(schemas)]
        for index, (name, schema) in enumerate(schemas.items()):
            if any(word in schema for word in _COMBINED):
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
        if quoted(self.value_end).startswith("<["):  # a special token, which no text holds
            return [f"{rule}: VALUE {quoted(end)}"]
        return [f"{rule}[suffix={json.dumps(end)}]: VALUE"]


class TaggedCallReader:
    """Reads one call, and writes its arguments as JSON: texts as they come, other values when they are complete."""

    def __init__(self, written: TaggedCalls, functions: Mapping[str, Schema]) -> None:
        self.name = ""
        self.has_ended = False
        self._written = written
        self._functions = functions
        self._text = ""  # that has not been read
        self._read: Callable[[], bool] = self._read_name
        self._key = ""
        self._value: list[str] = []  # of a value that is no text
        self._num_keys = 0
        self._is_new = False  # a value of which nothing has been read
        self._arguments: list[str] = []

    def read(self, text: str, start: int) -> int:
        self._text += text[start:]
        while not self.has_ended and self._read():
            pass
        if not self.has_ended:
            return len(text)
        return len(text) - len(self._text)

    def take_arguments(self) -> str:
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return arguments

    # -- states: read what is complete; whether to go on -------------------------------------------------------

    def _read_name(self) -> bool:
        name = self._tag(*self._written.name)
        if name is None:
            return False
        if name not in self._functions:
            self.has_ended = True
            return False
        self.name = name
        self._read = self._read_key
        return True

    def _read_key(self) -> bool:
        """Read the next parameter's name, or the end of the call."""
        text = self._text.lstrip()
        call_end, key_begin = self._written.call_end, self._written.key[0]
        if text.startswith(call_end):
            return self._end(text[len(call_end) :])
        if call_end.startswith(text) or key_begin.startswith(text):
            return False
        if not text.startswith(key_begin):  # broken: go on where something is known again
            places = [place for tag in (call_end, key_begin) if (place := text.find(tag)) >= 0]
            self._text = text[min(places) :] if places else text[-MAX_TAG_CHARS:]
            return bool(places)
        key = self._tag(*self._written.key)
        if not key:
            self._text = text[len(key_begin) :] if key == "" else self._text  # what is no key is skipped
            return key is not None
        self._key, self._is_new = key, True
        self._read = self._read_value_begin
        return True

    def _read_value_begin(self) -> bool:
        tag = self._written.value.strip()
        text = self._text.lstrip() if tag else self._text
        if len(text) < len(tag) and tag.startswith(text):
            return False
        self._text = text.removeprefix(tag)
        self._arguments.append(f"{', ' if self._num_keys else '{'}{json.dumps(self._key, ensure_ascii=False)}: ")
        self._num_keys += 1
        if self._is_text:
            self._arguments.append('"')
        self._read = self._read_value
        return True

    def _read_value(self) -> bool:
        trim, end = self._written.trim, self._written.value_end
        if self._is_new and trim:
            if not self._text:
                return False
            self._text = self._text.removeprefix(trim)
        self._is_new = False
        place, is_end = self._value_end()
        if place >= 0:
            value = self._text[:place].removesuffix(trim)
            self._add(value)
            self._text = self._text[place + len(end) :] if is_end else self._text[len(value) :]
        else:
            num_kept = num_begun(self._text, (trim + end, end))
            self._add(self._text[: len(self._text) - num_kept])
            self._text = self._text[len(self._text) - num_kept :]
        if is_end:
            self._end_value()
            self._read = self._read_key
        return is_end

    # -- parts of states ---------------------------------------------------------------------------------------

    @property
    def _is_text(self) -> bool:
        schema = self._functions[self.name]
        return is_text(schema, schema.get("properties", {}).get(self._key, {}))

    def _value_end(self) -> tuple[int, bool]:
        """Return where the value's end may be, or -1; whether it is there. A value may have the tag in it, too: it
        ends where the next parameter, or the call's end, follows."""
        end, following = self._written.value_end, self._written.after_value
        place = self._text.find(end)
        while place >= 0:
            rest = self._text[place + len(end) :].lstrip()
            if rest.startswith(following):
                return place, True
            if any(tag.startswith(rest) for tag in following):
                return place, False
            place = self._text.find(end, place + 1)
        return -1, False

    def _tag(self, begin: str, end: str) -> str | None:
        """Take a tag's content off the text; None: it is not complete; empty: it cannot be one, and stays."""
        begin, end, text = begin.strip(), end.strip(), self._text.lstrip()
        found = re.match(rf"{re.escape(begin)}([^<>]*?)\s*{re.escape(end) or '(?=<)'}", text)
        if found is None or found.end() > MAX_TAG_CHARS:
            inside = text[len(begin) :].partition("<")
            is_begun = begin.startswith(text) or (text.startswith(begin) and end.startswith("".join(inside[1:])))
            return None if is_begun and len(text) <= MAX_TAG_CHARS else ""
        if content := found[1].strip():
            self._text = text[found.end() :]
        return content

    def _add(self, part: str) -> None:
        if self._is_text:
            self._arguments.append(json.dumps(part, ensure_ascii=False)[1:-1])
        else:
            self._value.append(part)

    def _end_value(self) -> None:
        if self._is_text:
            self._arguments.append('"')
            return
        text = "".join(self._value).strip()
        self._value.clear()
        text = _PYTHON.get(text, text)
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            text = json.dumps(text, ensure_ascii=False)
        self._arguments.append(text)

    def _end(self, rest: str) -> bool:
        self._arguments.append("}" if self._num_keys else "{}")
        self._text = rest
        self.has_ended = True
        return False


def is_text(schema: Schema, value: Any) -> bool:
    """Whether a parameter's values are texts: by its schema, or since nothing says what they are."""
    if not isinstance(value, Mapping):
        return False
    if "$ref" in value or any(word in value for word in _COMBINED):
        return False
    if "type" in value:
        return bool(value["type"] == "string")
    known = value.get("enum") or ([value["const"]] if "const" in value else [])
    return all(isinstance(each, str) for each in known)


QWEN3_CODER = TaggedCalls(
    ("\n<function=", ">\n"), ("<parameter=", ">"), "", "</parameter>", "</function>", "</tool_call>", trim="\n"
)
GLM = TaggedCalls(("", "\n"), ("<arg_key>", "</arg_key>"), "\n<arg_value>", "</arg_value>", "</tool_call>", "")
