"""Log records as JSON, of this process and of processes whose output it passes on."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from types import TracebackType

from common.errors import traceback_text


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line, with an exception as a field, see `traceback_text`."""

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


def log_json(program: str) -> None:
    """Make this process log JSON as `program`, also for an exception that ends it."""
    logging.getLogger().handlers[0].setFormatter(JsonFormatter(program))
    sys.excepthook = _log_uncaught


def logs_json() -> bool:
    """Whether this process logs JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def json_line(service: str, text: str) -> str:
    """Return a line that `service` wrote as JSON. A record gets that name, which it may not know itself."""
    record = _record(text)
    if record is None:
        return JsonFormatter(service).format(
            logging.makeLogRecord({"name": service, "levelname": "INFO", "msg": text})
        )
    return json.dumps(record | {"service": service})


def message_of(line: str) -> str:
    """Return the message of a line that was logged as JSON; other lines are returned unchanged."""
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
