"""Views of an answer that streams: as it came through a pipe, as wrapped Markdown in a terminal."""

from __future__ import annotations

import os
import sys
from typing import Protocol

from rich.console import Console
from rich.status import Status

from cli.terminal.keys import signals_for_main_thread
from cli.terminal.markdown import Markdown

DEFAULT_COLUMNS = 80


class AnswerView(Protocol):
    """Context manager around one answer. Ends with a newline, whatever ended the answer."""

    def __enter__(self) -> AnswerView: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None: ...

    def write(self, piece: str) -> None: ...


class PlainAnswer:
    """The text and nothing else, on standard output."""

    def __init__(self) -> None:
        self._is_empty = True

    def __enter__(self) -> PlainAnswer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None or not self._is_empty:
            self.write("\n")

    def write(self, piece: str) -> None:
        self._is_empty = False
        sys.stdout.write(piece)
        sys.stdout.flush()


class TerminalAnswer:
    """Markdown in the rows of a terminal; until there is some of it, a spinner that leaves no trace."""

    def __init__(self, console: Console) -> None:
        """console: of standard output."""
        has_color = console.color_system is not None and not console.no_color
        self._markdown = Markdown(stdout_columns, has_color)
        self._status: Status | None = console.status("waiting for the first token", spinner_style="dim")
        self._plain = PlainAnswer()

    def __enter__(self) -> TerminalAnswer:
        assert self._status is not None
        with signals_for_main_thread():
            self._status.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._show(self._markdown.finish())
        self._stop_waiting()
        self._plain.__exit__(kind, error, trace)

    def write(self, piece: str) -> None:
        self._show(self._markdown.feed(piece))

    def _show(self, text: str) -> None:
        if text:
            self._stop_waiting()
            self._plain.write(text)

    def _stop_waiting(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def view_of_stdout() -> AnswerView:
    """The view that suits standard output."""
    console = Console()
    is_terminal = sys.stdout.isatty() and not console.is_dumb_terminal
    return TerminalAnswer(console) if is_terminal else PlainAnswer()


def stdout_columns() -> int:
    """Width of the terminal now. Not from COLUMNS, which a resize leaves as it is."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or DEFAULT_COLUMNS
    except OSError:
        return DEFAULT_COLUMNS
