"""Progress of what takes long before an engine is ready: what is done, and which part of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnProgress = Callable[[str, float | None], None]
"""Called with what is done and its part of 0 to 1, None where that is not known."""


def no_progress(what: str, part: float | None) -> None:
    """Tell nobody."""


def describe(what: str, part: float | None) -> str:
    """One line for a person."""
    return what if part is None else f"{what}: {part:.0%}"


@contextmanager
def terminal_progress() -> Iterator[OnProgress]:
    """Show it on a line of standard error, if that is a terminal; nothing is left of the line afterwards."""
    if not sys.stderr.isatty():
        yield no_progress
        return

    def show(what: str, part: float | None) -> None:
        sys.stderr.write(f"\r\x1b[K{describe(what, part)}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
