"""Shows Markdown while it streams. Pure: pieces in, text with escape sequences out, however the text is cut.

Bold, italic, code spans, headings, lists, quotes and code blocks are recognized; everything else is shown unchanged.
A mark whose closing mark may still come is held back, for at most MAX_SPAN characters: nothing is shown twice or
changed after it was shown. `cli/markdown/wrap.py` breaks rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from cli.markdown.wrap import Style, WrappedText

MAX_SPAN = 300  # characters between a mark and its closing mark
MAX_INFO = 80  # characters after a fence
_ESCAPABLE = "*_`#"
_STYLES = {1: Style.ITALIC, 2: Style.BOLD, 3: Style.BOLD | Style.ITALIC}
_PREFIX = re.compile(r"([-*+]|\d{1,9}[.)]|>)( +|$)")
_PART_OF_PREFIX = re.compile(r"[-*+>] *|\d{1,9}([.)] *)?|`{1,2}|~{1,2}|#{1,6} *")
_HEADING = re.compile(r"#{1,6}( +|$)")
_FENCE = re.compile(r"(`{3,}|~{3,})([^`]*)")
_PLAIN = re.compile(r"[^*_`\\]+")


@dataclass(frozen=True, slots=True)
class Span:
    """A pair of marks: `content` is between them, and `end` after them. Without style, the marks mean nothing."""

    content: str
    end: int
    style: Style = Style.PLAIN


class Markdown:
    """Feed it an answer piece by piece, then call `finish`; both return text for the terminal."""

    def __init__(self, columns: Callable[[], int], has_color: bool = True) -> None:
        self._out = WrappedText(columns, has_color)
        self._held = ""  # not shown yet
        self._fence = ""  # that began the open code block
        self._show_rest: Callable[[str, bool], int] | None = None  # shows the rest of this line; None: at its start
        self._line_style = Style.PLAIN
        self._previous = ""  # character before `_held`
        self._is_quote = False

    def feed(self, text: str) -> str:
        """Take a piece of the answer."""
        self._held += text
        self._show(is_end=False)
        return self._out.take()

    def finish(self) -> str:
        """Return the rest of the answer."""
        self._show(is_end=True)
        self._out.finish()
        return self._out.take()

    def _show(self, is_end: bool) -> None:
        while self._held:
            line, newline, _ = self._held.partition("\n")
            is_whole = bool(newline) or is_end
            if self._show_rest is None and not self._begin_line(line, is_whole):
                return
            if self._show_rest is None:  # there may be another prefix
                continue
            line = self._held.partition("\n")[0]
            shown = self._show_rest(line, is_whole)
            self._advance(shown)
            if shown < len(line) or not newline:
                return
            self._advance(1)
            self._out.newline()
            self._show_rest, self._line_style, self._previous, self._is_quote = None, Style.PLAIN, "", False

    def _advance(self, num_characters: int) -> None:
        if num_characters:
            self._previous = self._held[num_characters - 1]
            self._held = self._held[num_characters:]

    def _begin_line(self, line: str, is_whole: bool) -> bool:
        """Determine the kind of a line, and show its prefix; False until it is known."""
        rest = line.lstrip(" ")
        if self._fence:
            return self._begin_code_line(rest, is_whole)
        if not is_whole and (not rest or _PART_OF_PREFIX.fullmatch(rest)):
            return False
        indent = len(line) - len(rest)
        if (fence := _FENCE.match(rest)) and not self._is_quote:
            is_info = fence.end() == len(rest) and len(fence[2]) <= MAX_INFO
            if is_info and not is_whole:
                return False
            if is_info:
                self._fence = fence[1]
                self._show_rest = self._verbatim(Style.DIM)
                return True
        if prefix := _PREFIX.match(rest):
            mark = line[: indent + prefix.end()]
            self._out.verbatim(mark, Style.DIM)
            self._out.indent += len(mark)
            self._is_quote |= prefix[1] == ">"
            self._advance(len(mark))
            if len(mark) == len(line):
                self._show_rest = self._inline
            return True
        self._out.indent += indent
        if heading := _HEADING.match(rest):
            self._out.verbatim(line[:indent])
            self._line_style = Style.BOLD
            self._advance(indent + heading.end())
        self._show_rest = self._verbatim(Style.PLAIN) if rest.startswith("|") else self._inline  # a table's row
        return True

    def _begin_code_line(self, rest: str, is_whole: bool) -> bool:
        may_be_fence = not rest.rstrip(" ").strip(self._fence[0])
        if may_be_fence and not is_whole:
            return False
        ends = may_be_fence and len(rest.rstrip(" ")) >= len(self._fence)
        self._show_rest = self._verbatim(Style.DIM if ends else Style.CODE)
        if ends:
            self._fence = ""
        return True

    def _verbatim(self, style: Style) -> Callable[[str, bool], int]:
        def show(line: str, is_whole: bool) -> int:
            self._out.verbatim(line, style)
            return len(line)

        return show

    def _inline(self, line: str, is_whole: bool) -> int:
        return self._show_inline(line, is_whole, self._line_style, self._previous)

    def _show_inline(self, line: str, is_whole: bool, style: Style, previous: str) -> int:
        """Show the part of a line that is certain; return the number of characters shown."""
        at = 0
        while at < len(line):
            if plain := _PLAIN.match(line, at):
                self._out.text(plain[0], style)
                at = plain.end()
                continue
            if line[at] == "\\":
                if at + 1 == len(line) and not is_whole:
                    break
                is_escape = line[at + 1 : at + 2] in _ESCAPABLE and at + 1 < len(line)
                self._out.text(line[at + 1] if is_escape else "\\", style)
                at += 1 + is_escape
                continue
            span = find_span(line, at, line[at - 1] if at else previous, is_whole, at + MAX_SPAN, {})
            if span is None:
                break
            if Style.CODE in span.style or not span.style:
                self._out.text(span.content, style | span.style)
            else:
                self._show_inline(span.content, True, style | span.style, "")
            at = span.end
        return at


def find_span(
    text: str, at: int, previous: str, is_whole: bool, limit: int, known: dict[int, Span | None]
) -> Span | None:
    """Return the span that the marks at `at` begin; None while that depends on text to come.

    previous: the character before. limit: where a span must have ended. known: results for this text and limit.
    """
    if at not in known:
        known[at] = _find_span(text, at, previous, is_whole, limit, known)
    return known[at]


def _find_span(
    text: str, at: int, previous: str, is_whole: bool, limit: int, known: dict[int, Span | None]
) -> Span | None:
    mark = text[at]
    begin = _end_of_run(text, at)
    if begin == len(text) and not is_whole and begin < limit:
        return None
    nothing = Span(text[at:begin], begin)
    size = begin - at
    if previous == mark:  # the rest of a run that was longer than a span
        return nothing
    if mark != "`" and (size > 3 or _ends_word(text, begin) or _is_in_word(previous, mark)):
        return nothing
    position = begin
    while position < min(len(text), limit):
        character = text[position]
        if character == "\\" and mark != "`":
            position += 2
            continue
        if character not in "*_`":
            position += 1
            continue
        end = _end_of_run(text, position)
        if end >= limit:
            return nothing
        if end == len(text) and not is_whole:
            return None
        if mark == "`":
            if character == mark and end - position == size:
                return Span(_code(text[begin:position]), end, Style.CODE)
            position = end
            continue
        closes = character == mark and end - position >= size and not text[position - 1].isspace()
        if text[end : end + 1].isalnum() and (mark == "_" or end - position > size):
            closes = False
        if closes:
            return Span(text[begin:position], position + size, _STYLES[size])  # the rest may close an outer span
        if character == mark and end - position == size:
            position = end
            continue
        inner = find_span(text, position, text[position - 1], is_whole, limit, known)
        if inner is None:
            return None
        position = inner.end
    return nothing if is_whole or len(text) >= limit else None


def _end_of_run(text: str, at: int) -> int:
    end = at
    while end < len(text) and text[end] == text[at]:
        end += 1
    return end


def _ends_word(text: str, end: int) -> bool:
    return end >= len(text) or text[end].isspace()


def _is_in_word(previous: str, mark: str) -> bool:
    """Whether marks after this character cannot begin a span: 2*3, snake_case. Other scripts' marks touch words."""
    return previous.isalnum() and (mark == "_" or previous.isascii())


def _code(text: str) -> str:
    """Return the content of a code span, without a space on each side, which only separates it from backticks."""
    return text[1:-1] if text[:1] == text[-1:] == " " and text.strip() else text
