"""Progress of a start on the terminal of who waits for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from engine.wings import OnProgress, no_progress


@contextmanager
def terminal_progress() -> Iterator[OnProgress]:
    """Show it on a line of standard error, if that is a terminal; nothing is left of the line afterwards."""
    if not sys.stderr.isatty():
        yield no_progress
        return

    def show(what: str, part: float | None) -> None:
        sys.stderr.write(f"\r\x1b[K{what if part is None else f'{what}: {part:.0%}'}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
