"""A service's process: how it can end in its first moments, to whom it reports, and its memory. Quickly imported."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

NOTIFY_SOCKET = "NOTIFY_SOCKET"  # environment variable of systemd's notification protocol, see sd_notify(3)
TRIM_SECONDS = 10.0  # between two calls of `trim_heap`
M_ARENA_MAX = -8  # of glibc's mallopt


def exit_on_sigterm(status: int = 0) -> None:
    """End with a status on SIGTERM until the service sets its own handler.

    Importing a service takes seconds. The first process of a container ignores a signal that it does not handle: one
    that came in that time would be lost, and the service would run until it is killed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))


@dataclass(frozen=True, slots=True)
class Resident:
    """private: heaps and stacks. shared: used pages of the KV pool and the host tier, at most all of them."""

    private_bytes: int = 0
    shared_bytes: int = 0


def resident(pid: int | str = "self") -> Resident:
    """Resident memory of a process; zeros when it is gone, or without Linux's /proc."""
    with contextlib.suppress(OSError, KeyError):
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return Resident(*(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem")))
    return Resident()


def share_one_heap() -> None:
    """Let the few threads of this process allocate from one heap: several fragment separately."""
    _call_libc("mallopt", M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Give free pages inside of the heap back: requests of all sizes fragment it, and it would grow for hours."""
    _call_libc("malloc_trim", 0)


def _call_libc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)  # glibc has both
    if function is not None:
        function(*arguments)
