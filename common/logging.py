"""One line per event, readable in a terminal and in a file. Prompts and outputs are never logged."""

from __future__ import annotations

import logging
import sys
import traceback

from common.errors import MiniInferError

_FORMAT = "%(asctime)s %(levelname).1s %(name)s | %(message)s"


def setup_logging(program: str, level: str = "INFO") -> logging.Logger:
    """Send this process's log to stderr and return the program's logger."""
    logging.basicConfig(level=level.upper(), format=_FORMAT, datefmt="%H:%M:%S", stream=sys.stderr, force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    return logging.getLogger(program)


def traceback_text(error: BaseException) -> str:
    """Where `error` and its causes come from. Their messages are left out unless they are ours: that of a built-in
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
