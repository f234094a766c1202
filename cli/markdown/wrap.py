"""Wraps streamed text between words to fit a terminal's rows. Pure: text in, text with escape sequences out.

A word is written once its end is known, so that it never moves to the next row after it was shown. Knows nothing of
Markdown or of where its output goes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from enum import IntFlag

from rich.cells import cell_len, get_character_cell_size

# Chinese and Japanese are written without spaces: a row may end after any character except the first set, and begin
# with any except the second.
_NO_ROW_END = frozenset("（〈《「『【〔〖〘〚｛［")
_NO_ROW_START = frozenset("、。，．・：；？！）〉》」』】〕〗〙〛｝］ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ…‥")
_HANGUL = range(0xAC00, 0xD7A4)  # Korean uses spaces


class Style(IntFlag):
    """How text is shown. CODE is a color, the others are attributes."""

    PLAIN = 0
    BOLD = 1
    DIM = 2
    ITALIC = 4
    CODE = 8


_SGR = {Style.BOLD: "1", Style.DIM: "2", Style.ITALIC: "3", Style.CODE: "36"}


class WrappedText:
    """Takes text and returns terminal output. `indent`: columns before each continued row of a line."""

    def __init__(self, columns: Callable[[], int], has_color: bool = True) -> None:
        """columns: returns the terminal's width; called for each word, because it changes."""
        self.indent = 0
        self._columns = columns
        self._has_color = has_color
        self._out: list[str] = []
        self._shown = Style.PLAIN  # the terminal's current style
        self._column = 0  # cells written to this row
        self._num_spaces = 0  # read, and written with the next word if it fits
        self._word: list[tuple[str, Style]] = []
        self._word_cells = 0
        self._is_cut = False  # the word is longer than a row, and partly written

    def take(self) -> str:
        """Return what is to be written now."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def text(self, text: str, style: Style = Style.PLAIN) -> None:
        """Add text without newlines; rows end between words."""
        for character in text:
            if character in " \t":
                self._end_word()
                self._num_spaces += 1
                continue
            if self._word and may_break(self._word[-1][0], character):
                self._end_word()
            self._word.append((character, style))
            self._word_cells += get_character_cell_size(character)
            if self._is_cut or self._word_cells > self._columns() - self._row_begin():
                self._cut_word()

    def verbatim(self, text: str, style: Style = Style.PLAIN) -> None:
        """Add text without newlines unchanged; the terminal breaks it at the end of a row."""
        if text:
            self._end_word()
            self._write_spaces()
            self._write(text, style)

    def newline(self) -> None:
        """End the line. Trailing spaces are not written."""
        self._end_word()
        self._out.append("\n")
        self._column = self._num_spaces = self.indent = 0

    def finish(self) -> None:
        """Write the last word, and reset the terminal's style."""
        self._end_word()
        self._set_style(Style.PLAIN)

    def _end_word(self) -> None:
        if self._word and not self._is_cut:
            cells = cell_len("".join(character for character, _ in self._word))
            self._begin_word(cells)
        self._write_word()
        self._is_cut = False

    def _cut_word(self) -> None:
        """Begin a word that is longer than a row on a new row, and let the terminal break it."""
        if not self._is_cut:
            self._begin_word(self._word_cells)
            self._is_cut = True
        self._write_word()

    def _begin_word(self, cells: int) -> None:
        room = self._columns() - self._column - cells
        if room < self._num_spaces:
            if self._column > self._row_begin():
                self._out.append("\n" + " " * self._row_begin())
                self._column = self._row_begin()
                room = 0
            self._num_spaces = max(room, 0)
        self._write_spaces()

    def _write_word(self) -> None:
        for character, style in self._word:
            self._write(character, style)
        self._word.clear()
        self._word_cells = 0

    def _write_spaces(self) -> None:
        self._write(" " * self._num_spaces, self._shown)
        self._num_spaces = 0

    def _write(self, text: str, style: Style) -> None:
        if not text:
            return
        self._set_style(style)
        self._out.append(text)
        columns = self._columns()
        for character in text:
            cells = get_character_cell_size(character)
            self._column = cells if self._column + cells > columns else self._column + cells

    def _set_style(self, style: Style) -> None:
        if not self._has_color:
            style &= ~Style.CODE
        if style != self._shown:
            codes = [code for flag, code in _SGR.items() if flag in style]
            self._out.append(f"\x1b[{';'.join(['0', *codes])}m")
            self._shown = style

    def _row_begin(self) -> int:
        return self.indent if 2 * self.indent <= self._columns() else 0


def may_break(before: str, after: str) -> bool:
    """Whether a row may end between two characters, neither of which is a space."""
    if not (_is_unspaced(before) or _is_unspaced(after)):
        return False
    joins = unicodedata.combining(after) or not get_character_cell_size(after)
    return not (joins or before in _NO_ROW_END or after in _NO_ROW_START)


def _is_unspaced(character: str) -> bool:
    """Whether a character's script has no spaces between words. Wide symbols, such as emoji, stay in words."""
    if character < "\u2e80" or ord(character) in _HANGUL:
        return False
    return unicodedata.east_asian_width(character) in "WF" and unicodedata.category(character)[0] in "LP"
