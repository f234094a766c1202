"""Stacks of exceptions for the log, without what they may quote of requests."""

from __future__ import annotations

import traceback

from common.errors import MiniInferError


def traceback_text(error: BaseException) -> str:
    """Format the stack of `error` and its causes. Messages are left out unless they are ours: that of a built-in
    exception may quote the value that it stumbled over, such as a prompt."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        message = f": {current}" if isinstance(current, MiniInferError) else ""
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{frames}{type(current).__name__}{message}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n\nwhich came after\n\n".join(parts)
