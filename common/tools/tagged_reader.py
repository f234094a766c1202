"""Reads one call whose arguments are tags with values as it arrives, and writes it as JSON.

Strings are streamed; other values are written once complete. How the text is cut into pieces does not matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.text.stop_strings import num_begun
from common.tools.tool_parser import Schema

MAX_TAG_CHARS = 256
COMBINED = ("anyOf", "oneOf", "allOf", "$ref")
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as some models write JSON's words


@dataclass(frozen=True, slots=True)
class Tags:
    """How a call is written: `name` around the function's name, then for each parameter `key` around its name,
    `value`, the value, `value_end`.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: str  # between a key and its value
    value_end: str
    call_end: str  # after the last parameter
    end: str  # a marker after `call_end`; empty: none
    trim: str = ""  # around a value

    @property
    def after_value(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.key[0], self.call_end, self.end)))


class TaggedCallReader:
    """Reads one call and writes its arguments as JSON: strings as they arrive, other values once complete."""

    def __init__(self, written: Tags, functions: Mapping[str, Schema]) -> None:
        self.name = ""
        self.has_ended = False
        self._written = written
        self._functions = functions
        self._text = ""  # not read yet
        self._read: Callable[[], bool] = self._read_name
        self._key = ""
        self._value: list[str] = []  # parts of a value that is not a string
        self._num_keys = 0
        self._is_new = False  # nothing of the value has been read
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

    # -- states: each reads what is complete, and returns whether to continue ----------------------------------

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
        if not text.startswith(key_begin):  # broken: continue at the next known tag
            places = [place for tag in (call_end, key_begin) if (place := text.find(tag)) >= 0]
            self._text = text[min(places) :] if places else text[-MAX_TAG_CHARS:]
            return bool(places)
        key = self._tag(*self._written.key)
        if not key:
            self._text = text[len(key_begin) :] if key == "" else self._text  # an empty key is skipped
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
        """Return where the value may end, or -1, and whether it does. Since a value may contain the tag, it ends only
        where the next parameter or the end of the call follows."""
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
        """Take a tag's content off the text. None: incomplete; empty: not a tag, and the text is unchanged."""
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
    """Whether a parameter's values are strings: by its schema, or because the schema does not say."""
    if not isinstance(value, Mapping):
        return False
    if "$ref" in value or any(word in value for word in COMBINED):
        return False
    if "type" in value:
        return bool(value["type"] == "string")
    known = value.get("enum") or ([value["const"]] if "const" in value else [])
    return all(isinstance(each, str) for each in known)
