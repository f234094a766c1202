"""One line per event, readable in a terminal and in a file. Prompts and outputs are never logged."""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s %(levelname).1s %(name)s | %(message)s"


def setup_logging(program: str, level: str = "INFO") -> logging.Logger:
    """Send this process's log to stderr and return the program's logger."""
    logging.basicConfig(level=level.upper(), format=_FORMAT, datefmt="%H:%M:%S", stream=sys.stderr, force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    return logging.getLogger(program)
