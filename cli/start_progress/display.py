"""Start-up display of what services do: a live table in a terminal, otherwise lines at intervals."""

from __future__ import annotations

import contextlib
import time

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.cluster.progress import StartDisplay

STATUS_SECONDS = 10.0
_STYLES = {"starting": "yellow", "ready": "green", "failed": "red"}


class ProgressDisplay(StartDisplay):
    """Shows starts; after the context ends, log lines and states are plain lines."""

    def __init__(self, names: list[str], show_logs: bool, log_format: str = "text") -> None:
        super().__init__(names, show_logs, log_format)
        self._console = Console(stderr=True, highlight=False)
        self._states: dict[str, tuple[str, float]] = dict.fromkeys(names, ("waiting", self._begin))
        self._statuses: dict[str, tuple[str, float]] = {}  # what a service does, and when a line last said it
        self._live: Live | None = None

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        super().__exit__()

    def state(self, name: str, state: str) -> None:
        """Show that a service has changed its state."""
        self._states[name] = (state, time.monotonic())
        if self._live is None:
            super().state(name, state)

    def status(self, name: str, text: str) -> None:
        """Show what a service is doing; without a live table, a line repeats it at intervals."""
        now = time.monotonic()
        written = self._statuses.get(name, ("", now))[1]
        if self._live is None and now - written >= STATUS_SECONDS:
            written = now
            self._write("serve", f"{name}: {text}")
        self._statuses[name] = (text, written)
        if self._live is not None:
            self._live.refresh()

    def _write(self, name: str, text: str) -> None:
        if self._live is None:
            super()._write(name, text)
            return
        with contextlib.suppress(OSError):  # see write_line
            self._console.print(Text(self._formatted(name, text)), soft_wrap=True)

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for name, (state, since) in self._states.items():
            end = since if state == "ready" else now
            status = self._statuses.get(name, ("", 0.0))[0] if state == "starting" else ""
            shown = Text(state, _STYLES.get(state, "dim")), Text(f"{end - self._begin:5.1f} s", "dim"), Text(status)
            table.add_row(name, *shown)
        return table
