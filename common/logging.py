"""The log: one line per event, as text for people or as JSON for programs. Never has prompts or outputs."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
from typing import TextIO

from common.wings import from_wing, require_wing

LEVELS = ("debug", "info", "warning", "error")
LEVEL_HELP = "least severe messages shown"
FORMATS = ("text", "json")
FORMAT_HELP = (
    "text, or json: an object per line with time (UTC), level, service, logger, message, request_id and traceback"
)
MAX_LINES, WINDOW_SECONDS = 10, 10.0  # see RateLimit
_TEXT = "%(asctime)s %(levelname).1s %(name)s | %(message)s"
_CHOICE_OR_LEG = re.compile(r"-\d{1,9}(\.\d+)?$")  # suffix of a choice's or leg's name after the request's id


def about(name: str) -> dict[str, str]:
    """Return the `extra` of a line about the request, choice or leg `name`: the request's id, as its client knows it.

    Empty for an empty name.
    """
    return {"request_id": _CHOICE_OR_LEG.sub("", name)} if name else {}


class TextFormatter(logging.Formatter):
    """Formats a record as text; appends the id of the request that it is about if the message lacks it."""

    def __init__(self) -> None:
        super().__init__(_TEXT, "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", "")
        text = super().formatMessage(record)
        return text if request_id in record.message else f"{text} [{request_id}]"


def setup_logging(program: str, level: str, log_format: str) -> None:
    """Send the log of this process to stderr, as that of `program`. Raises ConfigError for an unavailable format."""
    logging.basicConfig(level=level.upper(), stream=sys.stderr, force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger().handlers[0].setFormatter(TextFormatter())
    if log_format == "json":
        require_wing("common.json_logs", "--log-format json")
        from common.json_logs.formatter import log_json

        log_json(program)


def current_format() -> str:
    """Return the format that this process logs in."""
    logs_json = from_wing("common.json_logs.formatter:logs_json")
    return "json" if logs_json and logs_json() else "text"


def write_line(text: str, stream: TextIO) -> None:
    """Write and flush one line. If that fails, as the disk is full or the reader of a pipe has left, the line is lost
    and the program goes on.
    """
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def report_end(program: str, error: Exception) -> None:
    """Report on one line why a program ends."""
    if current_format() == "json":
        logging.getLogger(program).error("%s", error)
    else:
        print(f"{program}: {error}", file=sys.stderr)


class RateLimit(logging.Filter):
    """Passes at most MAX_LINES per WINDOW_SECONDS of each line of code; the next one says how many were left out.

    For messages that a stranger can cause any number of times: call `logger.addFilter(RateLimit())` where `logger`
    is made. Lines of other loggers do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}  # place in the code -> (begin, lines since)

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), time.monotonic()
        begin, count = self._windows.get(place, (now, 0))
        if now - begin >= WINDOW_SECONDS:
            num_left_out = count - MAX_LINES
            begin, count = now, 0
            if num_left_out > 0:
                record.msg = f"{record.msg} ({num_left_out} more like this were left out)"
        self._windows[place] = (begin, count + 1)
        return count < MAX_LINES
