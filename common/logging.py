"""One line per event, readable in a terminal and in a file. Prompts and outputs are never logged."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable

from common.errors import MiniInferError

_FORMAT = "%(asctime)s %(levelname).1s %(name)s | %(message)s"


def setup_logging(program: str, level: str = "INFO") -> logging.Logger:
    """Send this process's log to stderr and return the program's logger."""
    logging.basicConfig(level=level.upper(), format=_FORMAT, datefmt="%H:%M:%S", stream=sys.stderr, force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    return logging.getLogger(program)


class RateLimit(logging.Filter):
    """At most `burst` lines per `per_seconds` from each line of code; the next one says how many were left out.

    For what a stranger can cause any number of times: `logger.addFilter(RateLimit())`, where `logger` is made. What
    other loggers say does not count.
    """

    def __init__(
        self, burst: int = 10, per_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._burst = burst
        self._per_seconds = per_seconds
        self._clock = clock
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}  # place in the code -> (begin, lines since)

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), self._clock()
        begin, count = self._windows.get(place, (now, 0))
        if now - begin >= self._per_seconds:
            num_left_out = count - self._burst
            begin, count = now, 0
            if num_left_out > 0:
                record.msg = f"{record.msg} ({num_left_out} more like this were left out)"
        self._windows[place] = (begin, count + 1)
        return count < self._burst


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
