"""Reads one call whose arguments are keywords with literals as it arrives, and writes it as JSON.

Strings are streamed; a number or word is written once complete. How the text is cut into pieces does not matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from common.text.stop_strings import num_begun
from common.tools.json_string import decoded
from common.tools.state_reader import StateReader
from common.tools.tool_parser import Schema

MAX_HEAD_CHARS = 256  # before a name is complete, and in a key
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_JSON_CLOSERS = {"]": "]", ")": "]", "}": "}"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_NAME = re.compile(r"([A-Za-z0-9_-]*)\s*")
_BLANKS = re.compile(r"\s*")
_BARE_KEY = re.compile(r"(?P<key>[^\s'\"=:,()\[\]{}<]+)\s*(?P<is>[=:]?)")
_QUOTED_KEY = re.compile(r"""(["'])(?P<key>(?:\\.|(?!\1)[^\\])*)(?:\1\s*(?P<is>:)?)?""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Literals:
    """How a format writes a call: `before`, the name, `opener`, arguments, and the closing characters."""

    before: str
    opener: str
    quote: str  # around a string
    end: str  # the marker after a call; it also ends a broken one


class LiteralCallReader(StateReader):
    """Reads one call. Once the name is complete it is a call: broken parts become text or are skipped."""

    def __init__(self, written: Literals, functions: Mapping[str, Schema]) -> None:
        super().__init__()
        self._written = written
        self._functions = functions
        self._read = self._read_name
        self._open: list[str] = []  # closing characters of the call and of the open values, the innermost last
        self._num_items = [0]  # number of the call's arguments, and of items in each open value
        self._num_unnamed = 0
        self._scalar: list[str] = []
        self._scalar_end = re.compile(rf"[,)\]}}{written.end[0]}]")
        self._arguments: list[str] = []

    def take_arguments(self) -> str:
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return arguments

    # -- states: each reads what is complete, and returns whether to continue ----------------------------------

    def _read_name(self) -> bool:
        text, before = self._text.lstrip(), self._written.before
        self.has_ended = len(self._text) > MAX_HEAD_CHARS
        if not text.startswith(before):
            self.has_ended = self.has_ended or not before.startswith(text)
            return False
        rest = text[len(before) :].lstrip()
        found = _NAME.match(rest)
        assert found is not None  # the match may be empty
        if found.end() == len(rest):
            return False
        if found[1] not in self._functions or rest[found.end()] != self._written.opener:
            self.has_ended = True
            return False
        self.name, self.has_ended = found[1], False
        self._at = len(self._text) - len(rest) + found.end() + 1
        self._open.append(_CLOSERS[self._written.opener])
        self._read = self._read_item
        return True

    def _read_item(self) -> bool:
        """Read up to the next value or key, or to the end of the open value."""
        char = self._next_char()
        if not char:
            return False
        if char == ",":
            self._at += 1
            return True
        if char in ")]}":
            return self._close(char)
        if char == self._written.end[0]:
            rest = self._text[self._at :]
            if rest.startswith(self._written.end):
                self._at += len(self._written.end)
                return self._end()
            if not rest.startswith(self._written.quote):
                is_begun = any(text.startswith(rest) for text in (self._written.end, self._written.quote))
                self._at += not is_begun
                return not is_begun
        if self._open[-1] == "}" or len(self._open) == 1:
            self._read = self._read_key
        else:
            self._begin_item("")
        return True

    def _read_key(self) -> bool:
        rest = self._text[self._at :]
        found = (_QUOTED_KEY if rest[0] in "\"'" else _BARE_KEY).match(rest)
        is_key = found is not None and bool(found["is"])
        if found is not None and not is_key and found.end() == len(rest) <= MAX_HEAD_CHARS:
            return False
        if found is not None and is_key:
            key = decoded(found["key"])
            self._at += found.end()
        else:  # a value without a key
            names = list(self._functions[self.name].get("properties", {}))
            self._num_unnamed += 1
            key = names[self._num_unnamed - 1] if self._num_unnamed <= len(names) else f"arg{self._num_unnamed}"
        self._begin_item(f"{json.dumps(key, ensure_ascii=False)}: ")
        return True

    def _read_value(self) -> bool:
        char = self._next_char()
        if not char:
            return False
        rest = self._text[self._at : self._at + MAX_HEAD_CHARS]
        quote = self._written.quote
        if rest.startswith(quote):
            self._at += len(quote)
            self._arguments.append('"')
            self._read = self._read_string
            return True
        if quote.startswith(rest):
            return False
        if char in _CLOSERS:
            self._at += 1
            self._open.append(_CLOSERS[char])
            self._num_items.append(0)
            self._arguments.append("{" if char == "{" else "[")
            self._read = self._read_item
        else:
            self._read = self._read_scalar
        return True

    def _read_string(self) -> bool:
        quote = self._written.quote
        end = self._text.find(quote, self._at)
        is_whole = end >= 0
        if not is_whole:
            end = len(self._text) - num_begun(self._text[self._at :], (quote,))
        part = self._text[self._at : end]
        self._at = end
        self._arguments.append(json.dumps(part, ensure_ascii=False)[1:-1])
        if is_whole:
            self._at += len(quote)
            self._arguments.append('"')
            self._read = self._read_item
        return is_whole

    def _read_scalar(self) -> bool:
        found = self._scalar_end.search(self._text, self._at)
        end = len(self._text) if found is None else found.start()
        self._scalar.append(self._text[self._at : end])
        self._at = end
        if found is None:
            return False
        text = "".join(self._scalar).strip()
        self._scalar.clear()
        self._arguments.append(_json_scalar(text))
        self._read = self._read_item
        return True

    # -- parts of states ---------------------------------------------------------------------------------------

    def _next_char(self) -> str:
        """Skip blanks; return the next character, or "" if the text must continue first."""
        found = _BLANKS.match(self._text, self._at)
        assert found is not None  # the match may be empty
        self._at = found.end()
        return self._text[self._at : self._at + 1]

    def _begin_item(self, key: str) -> None:
        is_first = self._num_items[-1] == 0
        begin = "{" if is_first and len(self._open) == 1 else "" if is_first else ", "
        self._num_items[-1] += 1
        self._arguments.append(begin + key)
        self._read = self._read_value

    def _close(self, char: str) -> bool:
        """Close the value that the character closes, and all values still open in it."""
        if char not in self._open:
            return self._end()
        while len(self._open) > 1:
            closer = self._open.pop()
            self._num_items.pop()
            self._arguments.append(_JSON_CLOSERS[closer])
            if closer == char:
                self._at += 1
                return True
        self._at += 1
        return self._end()

    def _end(self) -> bool:
        self._arguments += [_JSON_CLOSERS[closer] for closer in reversed(self._open[1:])]
        self._arguments.append("}" if self._num_items[0] else "{}")
        self.has_ended = True
        return False


def _json_scalar(text: str) -> str:
    """Return the JSON of a number or word; anything else becomes a string."""
    text = _WORDS.get(text, text)
    is_json = text in _WORDS.values() or _NUMBER.fullmatch(text)
    return text if is_json else json.dumps(text, ensure_ascii=False)
