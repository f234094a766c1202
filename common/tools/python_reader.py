"""Reads one call in Python syntax as it arrives, and writes it as JSON, one argument at a time.

If the first argument is not a literal, such as an f-string, the text is not a call. A later one becomes a string, its
source, since earlier arguments have been sent. How the text is cut into pieces does not matter.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from common.text.stop_strings import num_begun
from common.tools.state_reader import StateReader
from common.tools.tool_parser import Schema

_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_HEAD = re.compile(r"\s{0,64}([A-Za-z0-9_-]{0,128})\s{0,64}")
_BLANKS = re.compile(r"\s*")
_MARK = re.compile(r"""["'()\[\]{},]""")
_IN_STRING = {quote: re.compile(rf"\\|{quote}") for quote in ('"', "'", '"""', "'''")}
_KEYWORD = re.compile(r"""\s*([^\s'"=,:()\[\]{}<>*]+)\s*=(?!=)""")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class PythonCallReader(StateReader):
    """Reads one call: `before`, the name, and arguments up to the closing parenthesis."""

    def __init__(self, before: str, around: str, functions: Mapping[str, Schema]) -> None:
        """around: the name of a function that may wrap the call; empty: none."""
        super().__init__()
        self._before = before
        self._around = around
        self._is_around_open = False
        self._functions = functions
        self._called = ""
        self._read = self._read_before if before else self._read_head
        self._open: list[str] = []  # closing characters of the open values, the innermost last
        self._quote = ""  # of the open string
        self._argument: list[str] = []
        self._num_unnamed = 0
        self._keys: set[str] = set()  # of arguments already written
        self._arguments = ""

    def take_arguments(self) -> str:
        arguments, self._arguments = self._arguments, ""
        return arguments

    # -- states: each reads what is complete, and returns whether to continue ----------------------------------

    def _read_before(self) -> bool:
        if self._next_char() == self._before:
            self._at += 1
            self._read = self._read_head
            return True
        return self._fail_unless_at_end()

    def _read_head(self) -> bool:
        found = _HEAD.match(self._text, self._at)
        assert found is not None  # the match may be empty
        if found.end() == len(self._text):
            return False
        name = found[1]
        self._at = found.end()
        if self._text[self._at] != "(" or (name not in self._functions and name != self._around):
            return self._fail_unless_at_end()
        self._at += 1
        if name in self._functions:
            self._called = name
            self._read = self._read_arguments
        else:
            self._around, self._is_around_open = "", True
        return True

    def _read_arguments(self) -> bool:
        """Read up to the next string or bracket, or to the end of an argument."""
        found = _MARK.search(self._text, self._at)
        self._take(len(self._text) if found is None else found.start())
        if found is None:
            return False
        char, is_value_open = found[0], bool(self._open)
        if char in "\"'":
            return self._begin_string(char)
        if char in _CLOSERS:
            self._open.append(_CLOSERS[char])
        elif char != "," and char != (self._open.pop() if is_value_open else ")"):
            return self._end()
        if is_value_open or char in _CLOSERS:
            self._take(self._at + 1)
            return True
        if not self._end_argument():
            return self._end()
        self._at += 1
        if char == ")":
            self._read = self._read_end
        return True

    def _begin_string(self, char: str) -> bool:
        begun = self._text[self._at : self._at + 3]
        if begun in (char, char * 2) and self._at + len(begun) == len(self._text):
            return False  # it may be three quotes
        self._quote = char * 3 if begun == char * 3 else char
        self._take(self._at + len(self._quote))
        self._read = self._read_string
        return True

    def _read_string(self) -> bool:
        found = _IN_STRING[self._quote].search(self._text, self._at)
        if found is None:
            self._take_inside(len(self._text) - num_begun(self._text[self._at :], (self._quote,)))
            return False
        self._take_inside(found.start())
        if found[0] == "\\":
            if found.end() == len(self._text):
                return False
            self._take(found.end() + 1)
            return True
        self._take(found.end())
        self._read = self._read_arguments
        return True

    def _read_end(self) -> bool:
        """Read the closing parenthesis of the wrapping function, if there is one."""
        if self._is_around_open:
            char = self._next_char()
            if not char:
                return False
            if char != ")":
                return self._end()
            self._at += 1
        self.name = self._called
        return self._end()

    def _end(self) -> bool:
        """End the call, or the text that is not a call."""
        if self.name:
            self._arguments += "}" if self._keys else "{}"
        self.has_ended = True
        return False

    # -- parts of states ---------------------------------------------------------------------------------------

    def _next_char(self) -> str:
        """Skip blanks; return the next character, or "" if the text must continue first."""
        found = _BLANKS.match(self._text, self._at)
        assert found is not None  # the match may be empty
        self._at = found.end()
        return self._text[self._at : self._at + 1]

    def _fail_unless_at_end(self) -> bool:
        self.has_ended = self._at < len(self._text)
        return False

    def _take(self, end: int) -> None:
        self._argument.append(self._text[self._at : end])
        self._at = end

    def _take_inside(self, end: int) -> None:
        """Take a part of a string. Line breaks in a string with single quotes are taken as escaped ones."""
        self._take(end)
        if len(self._quote) == 1:
            self._argument[-1] = self._argument[-1].replace("\n", "\\n").replace("\r", "\\r")

    def _end_argument(self) -> bool:
        """Write the argument; return whether the text so far may be a call."""
        text = "".join(self._argument)
        self._argument.clear()
        found = _KEYWORD.match(text)
        source = text[found.end() if found else 0 :].strip()
        if found:
            key = found[1]
        elif source:
            self._num_unnamed += 1
            names = [*self._functions[self._called].get("properties", {})][self._num_unnamed - 1 :]
            key = names[0] if names else f"arg{self._num_unnamed}"
        else:
            return True
        try:
            value = _literal(source)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # all that `ast` may raise
            value = source
            if not self.name:
                return False
        if key not in self._keys:
            written = json.dumps({key: value}, ensure_ascii=False)[:-1]
            written = written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            self._arguments += f", {written[1:]}" if self._keys else written
            self._keys.add(key)
        self.name = self._called
        return True


def _literal(text: str) -> Any:
    """Return the value of a literal; plain words become a string. Raises one of several errors for anything else."""
    if text.startswith("*"):
        raise ValueError(text)
    value: Any
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        if not _MARK.search(text):
            return _WORDS.get(text, text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python lacks
            value = _value(ast.parse(f"({text}\n)", mode="eval").body)
    json.dumps(value, allow_nan=False)
    return value


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name():
            return _WORDS.get(node.id, node.id)
        case ast.List() | ast.Tuple():
            return [_value(each) for each in node.elts]
        case ast.Dict(keys=keys) if None not in keys:
            return {_value(key): _value(value) for key, value in zip(keys, node.values, strict=True) if key}
    raise ValueError(f"no literal: {type(node)}")
