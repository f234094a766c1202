"""Views of a streamed answer: unchanged through a pipe; in a terminal as Markdown, if that wing is present."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.status import Status
from rich.text import Text

from cli.terminal.keys import signals_for_main_thread
from common.wings import has_wing

if TYPE_CHECKING:
    from cli.markdown.markdown import Markdown

DEFAULT_COLUMNS = 80
SHOWN_REASONING = 400  # characters, of which one line is shown
# Control characters are shown as pictures, so that no answer can set the clipboard or the title.
_CONTROLS: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    0x0D: None,
    0x7F: 0x2421,
}


class AnswerView(Protocol):
    """Context manager around one answer. Ends with a newline, however the answer ended."""

    def __enter__(self) -> AnswerView: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None: ...

    def write(self, piece: str) -> None: ...

    def reason(self, reasoning: str) -> None:
        """Show that the model reasons, with the reasoning so far."""


class PlainAnswer:
    """The unchanged text on standard output."""

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

    def reason(self, reasoning: str) -> None:
        """Show nothing: a pipe only gets the answer."""


class TerminalAnswer:
    """The text without control characters; before it, a spinner that leaves no trace."""

    def __init__(self, console: Console) -> None:
        """console: of standard output."""
        self._markdown = _markdown(console)
        self._status: Status | None = console.status("waiting for the first token", spinner_style="dim")
        self._plain = PlainAnswer()

    def __enter__(self) -> TerminalAnswer:
        assert self._status is not None
        with signals_for_main_thread():
            self._status.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._show(self._markdown.finish() if self._markdown else "")
        self._stop_waiting()
        self._plain.__exit__(kind, error, trace)

    def write(self, piece: str) -> None:
        text = piece.translate(_CONTROLS)
        self._show(self._markdown.feed(text) if self._markdown else text)

    def reason(self, reasoning: str) -> None:
        """Show the end of the reasoning next to the spinner, until the answer begins."""
        if self._status is not None:
            end = " ".join(reasoning[-SHOWN_REASONING:].translate(_CONTROLS).split())
            self._status.update(Text(f"thinking: {end[-(stdout_columns() - 14) :]}", style="dim", no_wrap=True))

    def _show(self, text: str) -> None:
        if text:
            self._stop_waiting()
            self._plain.write(text)

    def _stop_waiting(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _markdown(console: Console) -> Markdown | None:
    if not has_wing("cli.markdown"):
        return None
    from cli.markdown.markdown import Markdown

    return Markdown(stdout_columns, console.color_system is not None and not console.no_color)


def view_of_stdout() -> AnswerView:
    """Return the view that suits standard output."""
    console = Console()
    is_terminal = sys.stdout.isatty() and not console.is_dumb_terminal
    return TerminalAnswer(console) if is_terminal else PlainAnswer()


def stdout_columns() -> int:
    """Return the terminal's current width. COLUMNS is not used, since a resize does not change it."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or DEFAULT_COLUMNS
    except OSError:
        return DEFAULT_COLUMNS
