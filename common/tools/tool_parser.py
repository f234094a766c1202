"""Extracts tool calls from an answer's text as it arrives. Knows nothing of tokens, requests or the API's JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from common.text.stop_strings import num_begun
from common.tools.call_reader import NO_ARGUMENTS

Schema = Mapping[str, Any]
MAX_UNNAMED_CHARS = 192  # before the name of a call in a format's variant: `{"name": "` and a name of 128
_MARKER = re.compile(r"<[|｜][^<>]*[|｜]>|</?\w+>|\[[A-Z_]+\]")


class CallReader(Protocol):
    """Reads one call, starting after the marker that begins it."""

    name: str  # of the function; empty until complete
    has_ended: bool  # with a name: a complete call; without: no call

    def read(self, text: str, start: int) -> int:
        """Read more text; return where reading stopped: at the end of the text or of the call.

        Negative if there is no call: this many characters of earlier texts are unread, too.
        """

    def take_arguments(self) -> str:
        """Return the JSON of the arguments that has arrived since the last call."""


class ToolFormat(Protocol):
    """One way to write calls."""

    @property
    def begin(self) -> str:
        """The marker before a call; empty: an answer that begins with a call's first character may be a call."""

    @property
    def opening(self) -> str:
        """Text written once before all calls; empty: none."""

    @property
    def answer_opening(self) -> str:
        """Text before an answer that is not a call, where a grammar allows both; empty: none."""

    @property
    def end(self) -> str:
        """The marker after a call; empty: none."""

    @property
    def variants(self) -> tuple[tuple[str, str], ...]:
        """Pairs written instead of `begin` and `end`; with an empty `begin`, a call may begin the answer."""

    @property
    def separator(self) -> str:
        """Characters that may precede another call, where no marker does; empty: a marker does."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Markers around all calls, which are dropped."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of a model."""

    @property
    def silent(self) -> tuple[str, ...]:
        """Special tokens that a grammar uses but that the reader of calls does not see."""

    def reader(self, functions: Mapping[str, Schema], is_first: bool, begin: str) -> CallReader:
        """Return a reader of a call of these functions. is_first: of the text. begin: the marker before it."""

    def before_arguments(self, names: Iterable[str]) -> Iterable[str] | None:
        """Return the text that `lark` puts before each function's JSON arguments; None: they are not JSON."""

    def lark(self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Callable[[str], str]) -> list[str]:
        """Return Lark rules, with `calls`, of calls that follow these schemas. `quoted` writes a text in Lark.

        Raises InvalidRequestError for a schema that the format cannot follow.
        """

    def lark_unmarked(
        self, schemas: Mapping[str, Schema], is_parallel: bool, quoted: Callable[[str], str]
    ) -> list[str] | None:
        """Return Lark rules, with `start`, of any text whose calls follow the schemas, even calls without a marker.

        None: all calls in a text begin with the marker. Raises InvalidRequestError as `lark` does.
        """


def markers_in(*texts: str) -> tuple[str, ...]:
    """Return the parts of texts that may be special tokens of a model."""
    return tuple(dict.fromkeys(_MARKER.findall("".join(texts))))


def alternatives(schemas: Mapping[str, Schema], rule: str = "call") -> str:
    """Return the Lark rule of a call of any of the functions: `call_0`, `call_1` and so on."""
    return f"{rule}: " + " | ".join(f"{rule}_{index}" for index in range(len(schemas)))


@dataclass(slots=True)
class CallDelta:
    """A new call, or more of the last call's arguments."""

    name: str  # of the new call's function; empty: the last call continues
    arguments: str


class ToolCallParser:
    """Extracts calls from a text that arrives in pieces, however it is cut.

    A call begins with the name of an offered function: everything before a complete name may turn out to be text and
    is held back. Markers around calls and blanks are dropped. Each character is read once.
    """

    def __init__(
        self,
        written: ToolFormat,
        functions: Mapping[str, Schema],
        is_parallel: bool = True,
        is_forced: bool = False,
        has_variants: bool = True,
    ) -> None:
        """functions: those that may be called, with the schemas of their arguments. Without is_parallel the text ends
        with its first call. is_forced: the text consists of calls only. has_variants: read the format's variants,
        too."""
        self._format = written
        self._functions = functions
        variants = written.variants if has_variants else ()
        self._end_of = {written.begin: written.end, **dict(variants)}  # marker after a call, by the one before it
        self._markers = tuple(filter(None, (*self._end_of, *written.ignored)))
        self._begin = "" if "" in self._end_of else written.begin  # of the current call
        self._end = self._end_of[self._begin]
        self._is_parallel = is_parallel
        self._is_forced = is_forced
        self._held: list[str] = []  # pieces that may belong to a call: blanks, a marker, an object without a name yet
        self._begun = ""  # beginning of a marker, after what is held
        self._has_calls = False
        self._has_arguments = False  # of the last call
        self._reader = self._new_reader()
        self._read: Callable[[str], str] = self._read_call if "" in self._end_of else self._find_begin
        self._shown: list[str] = []
        self._deltas: list[CallDelta] = []

    @property
    def has_ended(self) -> bool:
        """Whether no more text is wanted."""
        return self._has_calls and not self._is_parallel and self._reader.has_ended

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """Take more text; return the text outside of calls, and the new parts of calls."""
        while text and not self.has_ended:
            text = self._read(text)
        shown, self._shown = "".join(self._shown), []
        deltas, self._deltas = self._deltas, []
        return shown, deltas

    def finish(self) -> str:
        """Return what was held back when the text has ended. A call with an incomplete object remains a call."""
        rest = "".join(self._held) + self._begun
        self._held, self._begun = [], ""
        is_after_call = self._read == self._skip_end
        is_between = self._has_calls and not rest.strip(" \t\r\n" + self._format.separator)
        return "" if self._is_forced or is_after_call or is_between else rest

    def end_arguments(self) -> list[CallDelta]:
        """Return the arguments of a last call that has none, when the text has ended and was not cut off."""
        if not self._has_calls or self._has_arguments:
            return []
        self._has_arguments = True
        return [CallDelta("", NO_ARGUMENTS)]

    # -- parts of the text: each reads some of it and returns the rest -------------------------------------------

    def _find_begin(self, text: str) -> str:
        """Show text that cannot belong to a call."""
        text = self._begun + text
        found = [(place, marker) for marker in self._markers if (place := text.find(marker)) >= 0]
        start, begin = min(found, key=lambda each: (each[0], -len(each[1])), default=(-1, ""))
        end = start if start >= 0 else len(text) - num_begun(text, self._markers)
        shown = text[:end].rstrip()
        if shown:
            self._show_held()
            self._shown.append(shown)
        self._held.append(text[len(shown) : end])
        if start < 0:
            self._begun = text[end:]
            return ""
        self._begun = ""
        if begin in self._format.ignored:
            return text[start + len(begin) :]
        self._held.append(begin)
        self._begin, self._end = begin, self._end_of[begin]
        self._reader, self._read = self._new_reader(), self._read_call
        return text[start + len(begin) :]

    def _read_call(self, text: str) -> str:
        reader = self._reader
        was_named = bool(reader.name)
        num_read = self._num_to_read(text)
        text, rest = text[:num_read], text[num_read:]
        end = reader.read(text, 0)
        if end < 0:
            held = "".join(self._held)
            self._held, text, end = [held[:end]], held[end:] + text, 0
        if reader.name:
            arguments = reader.take_arguments()
            if not was_named:
                self._has_calls = True
                self._has_arguments = bool(arguments)
                self._held.clear()
                self._deltas.append(CallDelta(reader.name, arguments))
            elif arguments:
                self._has_arguments = True
                self._deltas.append(CallDelta("", arguments))
        else:
            self._held.append(text[:end])
        if reader.has_ended and reader.name:
            self._read = self._skip_end
        elif reader.has_ended or self._is_other_json():
            self._read = self._find_begin
            if not self._is_blank():  # blanks may still precede a call
                self._show_held()
        return text[end:] + rest

    def _num_to_read(self, text: str) -> int:
        """Return how much text the reader gets, so that `_is_other_json` does not depend on how the text was cut."""
        if not self._is_limited or self._reader.name:
            return len(text)
        return max(MAX_UNNAMED_CHARS + 1 - sum(map(len, self._held)), 1)

    def _is_other_json(self) -> bool:
        """Whether JSON without the format's own marker has no name where calls have it. Such answers are not held
        back."""
        return self._is_limited and not self._reader.name and sum(map(len, self._held)) > MAX_UNNAMED_CHARS

    @property
    def _is_limited(self) -> bool:
        return bool(self._format.begin) and self._end != self._format.end

    def _is_blank(self) -> bool:
        return not any(piece.strip() for piece in self._held)

    def _skip_end(self, text: str) -> str:
        """Drop the marker after a call, and the blanks before it."""
        end = self._end
        if not end:
            self._reader, self._read = self._new_reader(), self._read_call
            if not self._format.separator and not self._format.variants:
                self._read = self._find_begin
            return text
        text = self._begun + text
        marker = text.lstrip()
        self._begun = ""
        if not marker:
            self._held.append(text)
        elif len(marker) < len(end) and end.startswith(marker):
            self._held.append(text[: len(text) - len(marker)])
            self._begun = marker
        else:
            self._read = self._find_begin
            if marker.startswith(end):
                self._held.clear()
                return marker[len(end) :]
            if self._format.separator:
                self._reader, self._read = self._new_reader(), self._read_call
            return text
        return ""

    def _show_held(self) -> None:
        self._shown += self._held
        self._held.clear()

    def _new_reader(self) -> CallReader:
        return self._format.reader(self._functions, not self._has_calls, self._begin)
