"""Reports of a start: to the supervisor by systemd's notification protocol (sd_notify(3)), and to the log."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable

from common.process import NOTIFY_SOCKET

logger = logging.getLogger("engine")
LOG_SECONDS = 10.0  # between lines about a start


class StartReports:
    """An `OnProgress` that tells the supervisor about each stage of a start, and the log every LOG_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged = clock()

    def __call__(self, what: str, part: float | None) -> None:
        text = what if part is None else f"{what}: {part:.0%}"
        report_status(text)
        now = self._clock()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            logger.info("%s", text)


def report_status(text: str) -> None:
    """Tell a listening supervisor what this service is doing. Never waits, never raises."""
    address = os.environ.get(NOTIFY_SOCKET, "")
    if not address:
        return
    if address.startswith("@"):  # an abstract name, without a file
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as link,
    ):
        link.sendto(f"STATUS={text}\n".encode(), address)
