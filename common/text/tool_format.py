"""How models write tool calls: recognized from the chat template, forced by a grammar, parsed from an answer's text.

Knows nothing of tokens, requests or the API's JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import InvalidRequestError
from common.text import grammar
from common.text.stop_strings import num_begun


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write a call: `begin`, a JSON object with a name and arguments, `end`."""

    begin: str  # empty: an answer that begins with the object is a call
    end: str
    space: str  # between the object and the markers
    arguments: str  # the key of the arguments
    is_repeatable: bool  # an answer may have several calls, a line each


HERMES = ToolFormat("<tool_call>", "</tool_call>", "\n", "arguments", True)  # and Qwen
LLAMA3_JSON = ToolFormat("", "", "", "parameters", False)

_TAKES_TOOLS = re.compile(r"\btools\b")
# Templates show a model how to write calls. They tell these formats from others with the same markers.
_SHOWN = (
    (HERMES, re.compile(r"""<tool_call>(?:\s|\\n)*\{\\?["'](?:name|arguments)\\?["']""")),
    (LLAMA3_JSON, re.compile(r'\{"name": function name, "parameters": dictionary of argument name and its value\}')),
)


def tool_format(template: str) -> ToolFormat:
    """The format that a chat template's model is trained on. Raises InvalidRequestError when there is none."""
    if not _TAKES_TOOLS.search(template):
        raise InvalidRequestError("this model's chat template takes no tools", "tools")
    for found, pattern in _SHOWN:
        if pattern.search(template):
            return found
    raise InvalidRequestError("tools: this server cannot read the calls that this model writes", "tools")


def calls_grammar(
    written: ToolFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    is_parallel: bool,
    special: Mapping[str, int],
    answer: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of answers that are one call of one of these functions, or several calls where is_parallel.

    schemas: of the functions' arguments, by name. special: ids of the markers that are special tokens.
    answer: the schema of what may be said instead of calls.
    """

    def quoted(text: str) -> str:
        return json.dumps(text) if text else ""

    def marker(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else quoted(text)

    begin, end = marker(written.begin), marker(written.end)
    several = ' ("\\n" call)*' if is_parallel and written.is_repeatable else ""
    rules = [f"calls: call{several}", "call: " + " | ".join(f"call_{index}" for index in range(len(schemas)))]
    for index, (name, schema) in enumerate(schemas.items()):
        before = quoted(f'{written.space}{{"name": {json.dumps(name)}, "{written.arguments}": ')
        after = quoted("}" + written.space)
        rules.append(f"call_{index}: {begin} {before} arguments_{index} {after} {end}")
        rules.append(f"arguments_{index}: {grammar.json_rule(schema)}")
    if answer is None:
        return grammar.lark("\n".join(["start: calls", *rules]))
    return grammar.lark("\n".join(["start: calls | answer", *rules, f"answer: {grammar.json_rule(answer)}"]))


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str  # the JSON text of an object, as the model wrote it


class _CallObject(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
    parameters: msgspec.Raw = msgspec.Raw(b"")


class ToolCallParser:
    """Takes calls out of a text that arrives piece by piece. How it was cut does not matter.

    A call is complete with its object; the marker behind it, and blanks around calls, are left out. What turns out
    to be no call, such as one of a function that was not offered, is text. Each character is scanned once.
    """

    def __init__(self, written: ToolFormat, names: Collection[str], is_parallel: bool = True) -> None:
        """names: of the functions that may be called. Without is_parallel the text ends with its first call."""
        self._format = written
        self._names = names
        self._is_parallel = is_parallel
        self._held = ""  # a marker's beginning, a call's, or blanks that may come before one
        self._object: _ObjectEnd | None = None if written.begin else _ObjectEnd(0)  # inside a call
        self._is_behind_call = False  # and nothing but blanks and a part of the end marker has come since
        self._has_calls = False

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is wanted."""
        return self._has_calls and not self._is_parallel

    def push(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Take more text; return the text that is none of calls, and the calls that are complete."""
        self._held += text
        shown: list[str] = []
        calls: list[ParsedCall] = []
        while self._held and not self.has_ended and self._step(shown, calls):
            pass
        return "".join(shown), calls

    def finish(self) -> str:
        """Return what was held back: the text has ended."""
        rest, self._held = self._held, ""
        if self.has_ended or self._is_behind_call or (self._has_calls and rest.isspace()):
            return ""
        return rest

    def _step(self, shown: list[str], calls: list[ParsedCall]) -> bool:
        """Take the next part of the held text; False when more has to come first."""
        if self._is_behind_call:
            return self._skip_end()
        if self._object is None:
            return self._find_begin(shown)
        end = self._object.find(self._held)
        if end is None:
            return False
        call = self._parsed(self._held[self._object.start : end])
        if call is None:
            shown.append(self._held[:end])
        else:
            calls.append(call)
            self._has_calls = self._is_behind_call = True
        self._held, self._object = self._held[end:], None
        return True

    def _find_begin(self, shown: list[str]) -> bool:
        """Show what cannot belong to a call."""
        begin, held = self._format.begin, self._held
        start = held.find(begin) if begin else -1
        end = start if start >= 0 else len(held) - num_begun(held, (begin,))
        text = held[:end].rstrip()
        shown.append(text)
        self._held = held[len(text) :]
        if start < 0:
            return False
        self._object = _ObjectEnd(start + len(begin) - len(text))
        return True

    def _skip_end(self) -> bool:
        text, end = self._held.lstrip(), self._format.end
        if len(text) < len(end) and end.startswith(text):
            return False
        self._is_behind_call = False
        if end and text.startswith(end):
            self._held = text[len(end) :]
        return True

    def _parsed(self, text: str) -> ParsedCall | None:
        try:
            call = msgspec.json.decode(text, type=_CallObject)
        except (msgspec.DecodeError, RecursionError):
            return None
        given = (bytes(call.parameters) or bytes(call.arguments)).decode()
        return ParsedCall(call.name, given) if call.name in self._names and given[0] == "{" else None


class _ObjectEnd:
    """Finds the end of a JSON object in a text that grows. Blanks may come first."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._position = start
        self._depth = 0
        self._is_in_string = False

    def find(self, text: str) -> int | None:
        """Return the end of the object, or of what cannot become one; None when more has to come first."""
        if not self._depth:
            rest = text[self._position :].lstrip()
            self._position = len(text) - len(rest)
            if not rest.startswith("{"):
                return self._position if rest else None
        while self._position < len(text):
            char = text[self._position]
            if self._is_in_string:
                if char == "\\":  # the next one is no quote
                    if self._position + 1 == len(text):
                        return None
                    self._position += 1
                self._is_in_string = char != '"'
            elif char == '"':
                self._is_in_string = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
            self._position += 1
            if not self._depth:
                return self._position
        return None
