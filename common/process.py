"""A service's process: SIGTERM while it starts, the variable of its status socket, its heap. Quick to import."""

from __future__ import annotations

import ctypes
import signal
import sys

NOTIFY_SOCKET = "NOTIFY_SOCKET"  # environment variable of systemd's notification protocol, see sd_notify(3)
TRIM_SECONDS = 10.0  # between two calls of `trim_heap`
M_ARENA_MAX = -8  # a parameter of glibc's mallopt


def exit_on_sigterm(status: int = 0) -> None:
    """Exit with `status` on SIGTERM, until the service sets its own handler.

    Importing a service takes seconds. The first process of a container ignores signals without a handler: a SIGTERM
    in that time would be lost, and the service would run until it is killed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))


def share_one_heap() -> None:
    """Let all threads of this process allocate from one heap: several heaps fragment separately."""
    _call_libc("mallopt", M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Return free pages inside the heap to the system: requests of all sizes fragment it, so it grows for hours."""
    _call_libc("malloc_trim", 0)


def _call_libc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)  # only glibc has these functions
    if function is not None:
        function(*arguments)
