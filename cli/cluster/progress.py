"""Start-up display of `mini-infer serve`: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.logging import json_line, write_line

STATUS_SECONDS = 10.0
_STYLES = {"starting": "yellow", "ready": "green", "failed": "red"}


class StartDisplay:
    """Context manager. Log lines and states come in any order; after it ends, both are plain lines."""

    def __init__(self, names: list[str], show_logs: bool, log_format: str = "text") -> None:
        self._console = Console(stderr=True, highlight=False)
        self._show_logs = show_logs
        self._is_json = log_format == "json"
        self._width = max(len(name) for name in [*names, "serve"])
        self._begin = time.monotonic()
        self._states: dict[str, tuple[str, float]] = dict.fromkeys(names, ("waiting", self._begin))
        self._statuses: dict[str, tuple[str, float]] = {}  # what a service does, and when that was written as a line
        self._live: Live | None = None

    def __enter__(self) -> StartDisplay:
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._show_logs = True

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._begin

    def line(self, name: str, text: str) -> None:
        """One line of a service's log."""
        if not self._show_logs:
            return
        self._write(name, text)

    def reveal(self, name: str, lines: Sequence[str]) -> None:
        """Show lines that were held back, because they say why the service ended."""
        if not self._show_logs:
            self._show_logs = True
            for text in lines:
                self.line(name, text)

    def state(self, name: str, state: str) -> None:
        """A service changed its state."""
        self._states[name] = (state, time.monotonic())
        if self._live is None:
            self._write("serve", f"{name}: {state}")

    def status(self, name: str, text: str) -> None:
        """A service says what it is doing; where there is no live table, a line now and then repeats it."""
        now = time.monotonic()
        written = self._statuses.get(name, ("", now))[1]
        if self._live is None and now - written >= STATUS_SECONDS:
            written = now
            self._write("serve", f"{name}: {text}")
        self._statuses[name] = (text, written)
        if self._live is not None:
            self._live.refresh()

    def tell(self, text: str) -> None:
        """A line of `serve` itself, which is no service."""
        write_line(json_line("serve", text) if self._is_json else text, sys.stderr)

    def _write(self, name: str, text: str) -> None:
        line = json_line(name, text) if self._is_json else f"{name:<{self._width}} | {text}"
        if self._live is not None:
            with contextlib.suppress(OSError):  # see write_line
                self._console.print(Text(line), soft_wrap=True)
        else:
            write_line(line, sys.stderr)

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for name, (state, since) in self._states.items():
            end = since if state == "ready" else now
            status = self._statuses.get(name, ("", 0.0))[0] if state == "starting" else ""
            shown = Text(state, _STYLES.get(state, "dim")), Text(f"{end - self._begin:5.1f} s", "dim"), Text(status)
            table.add_row(name, *shown)
        return table
