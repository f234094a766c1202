"""What a worker says while its engine starts: to its supervisor as it goes, to the log now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from common.startup import report_status
from engine.start_progress import describe

LOG_SECONDS = 10.0

logger = logging.getLogger("engine")


class StartReports:
    """An `OnProgress`. Loads that end within LOG_SECONDS leave no line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged = clock()

    def __call__(self, what: str, part: float | None) -> None:
        text = describe(what, part)
        report_status(text)
        now = self._clock()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            logger.info("%s", text)
