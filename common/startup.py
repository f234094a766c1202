"""The first moments of a service process: how it can end, and what it says of itself. Quickly imported."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

NOTIFY_SOCKET = "NOTIFY_SOCKET"  # environment variable of systemd's notification protocol, see sd_notify(3)


def exit_on_sigterm(status: int = 0) -> None:
    """End with a status on SIGTERM until the service sets its own handler.

    Importing a service takes seconds. The first process of a container ignores a signal that it does not handle: one
    that came in that time would be lost, and the service would run until it is killed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))


def report_status(text: str) -> None:
    """Tell the supervisor, if there is one that listens, what this service is doing. Never waits, never raises."""
    address = os.environ.get(NOTIFY_SOCKET, "")
    if not address:
        return
    if address.startswith("@"):  # a name without a file
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as link,
    ):
        link.sendto(f"STATUS={text}\n".encode(), address)
