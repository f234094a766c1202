"""Reads the JSON object of one tool call as it arrives: first its complete name, then its arguments in pieces.

Each character is read once, and how the text is cut into pieces does not matter. The reader knows nothing of markers
except the first character of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from enum import Enum, auto

from common.tools.json_string import StringDecoder, decoded

NO_ARGUMENTS = "{}"

_BLANKS = re.compile(r"[ \t\r\n]*")
_STRING_PART = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # ends at the closing quote or at a lone backslash


class _Role(Enum):
    """What a string or another value of the object stands for."""

    KEY = auto()
    NAME = auto()
    ARGUMENTS = auto()
    OTHER = auto()


_ROLE_OF_KEY = {"name": _Role.NAME, "arguments": _Role.ARGUMENTS, "parameters": _Role.ARGUMENTS}


class CallReader:
    """Reads one object. Invalid JSON before the name is complete means that the object is not a call.

    Once the name is complete it is a call, and invalid JSON is skipped. The call ends at its closing brace, or before
    a character outside of strings that begins a marker. Arguments are the characters of their value, or the decoded
    text if the value is a string. Only the first name and the first arguments count.
    """

    def __init__(self, names: Collection[str], stop: str = "", lead: str = "") -> None:
        """names: of the functions that may be called. stop: the first character of a marker. lead: characters besides
        blanks that may come before the object."""
        self.name = ""
        self.has_ended = False  # with a name: a complete call; without: no call
        self._names = names
        self._stop = stop
        self._lead = re.compile(rf"[ \t\r\n{re.escape(lead)}]*")
        self._outside = re.compile(rf'["{{}}\[\]{stop}]')
        self._state: Callable[[str, int], int] = self._before
        self._depth = 1
        self._is_in_string = False  # in a string inside of a nested value
        self._is_escaped = False
        self._role = _Role.KEY
        self._string: list[str] = []  # parts of a key or a name
        self._decoder = StringDecoder()  # for arguments that are a string
        self._has_arguments = False
        self._arguments: list[str] = []

    def read(self, text: str, start: int) -> int:
        """Read more text; return where reading stopped: at the end of the text or of the object."""
        position = start
        while position < len(text) and not self.has_ended:
            position = self._state(text, position)
        return position

    def _begin_value(self) -> None:
        """Continue with the arguments, since the name has been read elsewhere."""
        self._role = _Role.ARGUMENTS
        self._state = self._value

    def take_arguments(self) -> str:
        """Return the arguments that have arrived since the last call."""
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return arguments

    # -- states: each reads from a position and returns the next one -------------------------------------------

    def _before(self, text: str, start: int) -> int:
        matched = self._lead.match(text, start)
        assert matched is not None  # the match may be empty
        position = matched.end()
        if position < len(text):
            if text[position] != "{":
                return self._end(position)
            self._state = self._key
            position += 1
        return position

    def _key(self, text: str, start: int) -> int:
        position = after_blanks(text, start)
        match text[position : position + 1]:
            case '"':
                return self._begin_string(_Role.KEY, position)
            case "}":
                return self._end(position + 1)
        return self._unexpected(text, position)

    def _colon(self, text: str, start: int) -> int:
        position = after_blanks(text, start)
        if text[position : position + 1] != ":":
            return self._unexpected(text, position)
        self._state = self._value
        return position + 1

    def _value(self, text: str, start: int) -> int:
        position = after_blanks(text, start)
        match text[position : position + 1]:
            case "":
                return position
            case '"':
                return self._begin_string(self._role, position)
            case "," | "}":
                return self._unexpected(text, position)
            case first if first == self._stop or (self._role is _Role.NAME and not self.name):
                return self._end(position)
            case "{" | "[":
                self._state = self._nested
            case _:
                self._state = self._scalar
        return position

    def _comma(self, text: str, start: int) -> int:
        position = after_blanks(text, start)
        match text[position : position + 1]:
            case ",":
                self._state = self._key
                return position + 1
            case "}":
                return self._end(position + 1)
        return self._unexpected(text, position)

    def _unexpected(self, text: str, position: int) -> int:
        """Handle invalid JSON, unless the text is only incomplete."""
        if position == len(text):
            return position
        if not self.name or text[position] == self._stop:
            return self._end(position)
        if text[position] in ",}":
            self._state = self._comma
            return position
        self._role = _Role.OTHER
        return self._value(text, position)

    def _scalar(self, text: str, start: int) -> int:
        position = start
        while position < len(text) and text[position] not in ",} \t\r\n" and text[position] != self._stop:
            position += 1
        self._take(text[start:position])
        if position < len(text):
            self._state = self._comma
        return position

    def _nested(self, text: str, start: int) -> int:
        """Read a value that is an object or an array."""
        position = start
        while position < len(text):
            if self._is_in_string:
                position = self._string_end(text, position)
                if position < len(text):
                    self._is_in_string = False
                    position += 1
                continue
            found = self._outside.search(text, position)
            if found is None:
                position = len(text)
                break
            position = found.end()
            match found[0]:
                case '"':
                    self._is_in_string = True
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                case _:
                    self._take(text[start : position - 1])
                    return self._end(position - 1)
            if self._depth == 1 and not self._is_in_string:
                self._state = self._comma
                break
        self._take(text[start:position])
        return position

    def _begin_string(self, role: _Role, position: int) -> int:
        self._role = role
        self._state = self._in_string
        return position + 1

    def _in_string(self, text: str, start: int) -> int:
        position = self._string_end(text, start)
        part, is_whole = text[start:position], position < len(text)
        if self._role is _Role.ARGUMENTS:
            self._take(self._decoder.push(part, is_whole))
        elif self._role is not _Role.OTHER:
            self._string.append(part)
        if not is_whole:
            return position
        if self._role is _Role.KEY:
            self._state = self._colon
            self._role = self._role_of(self._taken_string())
        else:
            self._state = self._comma
            if self._role is _Role.NAME:
                name = self._taken_string()
                if name not in self._names:
                    return self._end(position + 1)
                self.name = name
        return position + 1

    # -- parts of states ---------------------------------------------------------------------------------------

    def _string_end(self, text: str, position: int) -> int:
        """Return the position of the closing quote, or the text's length. An escaped quote does not count."""
        if self._is_escaped:
            self._is_escaped = False
            position += 1
        matched = _STRING_PART.match(text, position)
        assert matched is not None  # the match may be empty
        if text[matched.end() : matched.end() + 1] == "\\":
            self._is_escaped = True
            return len(text)
        return matched.end()

    def _taken_string(self) -> str:
        text = "".join(self._string)
        self._string.clear()
        return decoded(text)

    def _role_of(self, key: str) -> _Role:
        role = _ROLE_OF_KEY.get(key, _Role.OTHER)
        is_again = (role is _Role.NAME and self.name) or (role is _Role.ARGUMENTS and self._has_arguments)
        return _Role.OTHER if is_again else role

    def _take(self, part: str) -> None:
        if part and self._role is _Role.ARGUMENTS:
            self._arguments.append(part)
            self._has_arguments = True

    def _end(self, position: int) -> int:
        if self.name and not self._has_arguments:
            self._arguments.append(NO_ARGUMENTS)
        self.has_ended = True
        return position


def after_blanks(text: str, start: int) -> int:
    matched = _BLANKS.match(text, start)
    assert matched is not None  # the match may be empty
    return matched.end()
