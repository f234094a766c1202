"""Start-up display of `mini-infer serve`: plain lines. `cli/start_progress` shows more."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from common.logging import write_line
from common.wings import require_wing


class StartDisplay:
    """Context manager that shows log lines and states, in any order."""

    def __init__(self, names: list[str], show_logs: bool, log_format: str = "text") -> None:
        self._show_logs = show_logs
        self._begin = time.monotonic()
        width = max(len(name) for name in [*names, "serve"])
        self._own_line: Callable[[str], str] = lambda text: text
        self._formatted: Callable[[str, str], str] = lambda name, text: f"{name:<{width}} | {text}"
        if log_format == "json":
            require_wing("common.json_logs", "--log-format json")
            from common.json_logs.formatter import json_line

            self._own_line, self._formatted = partial(json_line, "serve"), json_line

    def __enter__(self) -> StartDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._show_logs = True

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._begin

    def line(self, name: str, text: str) -> None:
        """Show one line of a service's log."""
        if self._show_logs:
            self._write(name, text)

    def reveal(self, name: str, lines: Sequence[str]) -> None:
        """Show lines that were hidden so far, because they say why the service ended."""
        if not self._show_logs:
            self._show_logs = True
            for text in lines:
                self.line(name, text)

    def state(self, name: str, state: str) -> None:
        """Show that a service has changed its state."""
        self._write("serve", f"{name}: {state}")

    def status(self, name: str, text: str) -> None:
        """Called with a service's report of what it is doing; not shown here."""

    def tell(self, text: str) -> None:
        """Show a line of `serve` itself."""
        write_line(self._own_line(text), sys.stderr)

    def _write(self, name: str, text: str) -> None:
        write_line(self._formatted(name, text), sys.stderr)
