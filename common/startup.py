"""The first moments of a service process: how it can end, and to whom it reports. Quickly imported."""

from __future__ import annotations

import signal
import sys

NOTIFY_SOCKET = "NOTIFY_SOCKET"  # environment variable of systemd's notification protocol, see sd_notify(3)


def exit_on_sigterm(status: int = 0) -> None:
    """End with a status on SIGTERM until the service sets its own handler.

    Importing a service takes seconds. The first process of a container ignores a signal that it does not handle: one
    that came in that time would be lost, and the service would run until it is killed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))
