"""Progress of what takes long before an engine is ready: what is done, and which part of it."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, float | None], None]
"""Called with what is done and its part of 0 to 1, None where that is not known."""


def no_progress(what: str, part: float | None) -> None:
    """Tell nobody."""


def describe(what: str, part: float | None) -> str:
    """One line for a person."""
    return what if part is None else f"{what}: {part:.0%}"
