"""One line per event, for a person or, as JSON, for a program. Prompts and outputs are never logged."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

from common.errors import MiniInferError

LEVELS = ("debug", "info", "warning", "error")
LEVEL_HELP = "least severe messages shown"
FORMATS = ("text", "json")
FORMAT_HELP = (
    "text, or json: an object per line with time (UTC), level, service, logger, message, request_id and traceback"
)
_TEXT = "%(asctime)s %(levelname).1s %(name)s | %(message)s"
_CHOICE_OR_LEG = re.compile(r"-\d{1,9}(\.\d+)?$")  # what follows a request's id in the name of a choice or leg of it


def about(name: str) -> dict[str, str]:
    """The `extra` of a line about the request, choice or leg of that name: the request's id, as its client knows it.

    Empty for an empty name.
    """
    return {"request_id": _CHOICE_OR_LEG.sub("", name)} if name else {}


class TextFormatter(logging.Formatter):
    """Formats a record as text, with the id of the request that it is about, if its message lacks it."""

    def __init__(self) -> None:
        super().__init__(_TEXT, "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", "")
        text = super().formatMessage(record)
        return text if request_id in record.message else f"{text} [{request_id}]"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line; an exception is a field, see `traceback_text`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            fields["request_id"] = request_id
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = traceback_text(record.exc_info[1])
        return json.dumps(fields)


def setup_logging(program: str, level: str, log_format: str) -> None:
    """Send this process's log to stderr, as that of `program`."""
    logging.basicConfig(level=level.upper(), stream=sys.stderr, force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger().handlers[0].setFormatter(TextFormatter())
    if log_format == "json":
        logging.getLogger().handlers[0].setFormatter(JsonFormatter(program))
        sys.excepthook = _log_uncaught


def current_format() -> str:
    """The format that this process logs in."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(handler.formatter, JsonFormatter) for handler in handlers) else "text"


def write_line(text: str, stream: TextIO) -> None:
    """Write one line at once. What cannot be written is lost, and the program goes on: a disk may be full, and the
    reader of a pipe may have left.
    """
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def report_end(program: str, error: Exception) -> None:
    """Say why a program ends, on a line of its own."""
    if current_format() == "json":
        logging.getLogger(program).error("%s", error)
    else:
        print(f"{program}: {error}", file=sys.stderr)


def json_line(service: str, text: str) -> str:
    """A line that `service` wrote, as JSON: a record gets its name, which its own process may not know."""
    record = _record(text)
    if record is None:
        return JsonFormatter(service).format(
            logging.makeLogRecord({"name": service, "levelname": "INFO", "msg": text})
        )
    return json.dumps(record | {"service": service})


def message_of(line: str) -> str:
    """The message of a line that was logged as JSON; any other line as it is."""
    record = _record(line)
    return line if record is None else str(record["message"])


def _record(line: str) -> dict[str, object] | None:
    try:
        record = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and "message" in record else None


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger().critical("this process ends: %s", kind.__name__, exc_info=(kind, error, trace))


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
