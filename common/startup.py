"""The first moments of a service process, before it can end in its own way. Imports nothing that takes time."""

from __future__ import annotations

import signal
import sys


def exit_on_sigterm() -> None:
    """End with status 0 on SIGTERM until the service sets its own handler.

    Importing a service takes seconds. The first process of a container ignores a signal that it does not handle: one
    that came in that time would be lost, and the service would run until it is killed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
