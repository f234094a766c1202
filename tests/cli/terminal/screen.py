"""A screen for tests: text and the few escape sequences of our programs become rows of characters."""

from __future__ import annotations

import re

from rich.cells import get_character_cell_size

_SEQUENCE = re.compile(r"\x1b\[([?\d;]*) ?([A-Za-z])|\x1b\][^\x07]*\x07|\x1b[=>78]")
SGR = re.compile(r"\x1b\[[\d;]*m")


class Screen:
    """Behaves as xterm: a character in the last column stays there, and the next one goes to the next row."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.cells: list[list[str]] = [[]]
        self.row = self.column = 0
        self._rest = ""

    @property
    def rows(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.cells]

    @property
    def text(self) -> str:
        return "\n".join(self.rows)

    def feed(self, text: str) -> list[str]:
        """Show the text; return the sequences that ask for an answer."""
        text, self._rest, asked = self._rest + text, "", []
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                match = _SEQUENCE.match(text, at)
                if match is None:
                    self._rest = text[at:]
                    break
                if match[2] == "n":
                    asked.append(match[0])
                self._command(match[1] or "", match[2] or "")
                at = match.end()
                continue
            self._put(text[at])
            at += 1
        return asked

    def _put(self, character: str) -> None:
        if character == "\n":
            self.row += 1
        elif character == "\r":
            self.column = 0
        elif character == "\b":
            self.column = max(self.column - 1, 0)
        elif character >= " ":
            width = get_character_cell_size(character)
            if self.column + width > self.columns:
                self.row, self.column = self.row + 1, 0
            self._grow()
            row = self.cells[self.row]
            row += [" "] * (self.column + width - len(row))
            row[self.column : self.column + width] = [character] + [""] * (width - 1)
            self.column += width
        self._grow()

    def _command(self, numbers: str, name: str) -> None:
        number = int(numbers) if numbers.isdigit() else 0
        if name == "K":
            row = self.cells[self.row]
            row[:] = [] if number == 2 else row[: self.column]
        elif name == "J":
            self.cells[self.row] = self.cells[self.row][: self.column]
            del self.cells[self.row + 1 :]
        elif name == "A":
            self.row = max(self.row - (number or 1), 0)
        elif name == "B":
            self.row += number or 1
        elif name == "C":
            self.column += number or 1
        elif name == "D":
            self.column = max(self.column - (number or 1), 0)
        elif name == "G":
            self.column = max(number - 1, 0)
        self._grow()

    def _grow(self) -> None:
        while len(self.cells) <= self.row:
            self.cells.append([])
