"""A service's process: SIGTERM while it starts, the variable of its status socket, its memory. Quick to import."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

NOTIFY_SOCKET = "NOTIFY_SOCKET"  # environment variable of systemd's notification protocol, see sd_notify(3)
TRIM_SECONDS = 10.0  # between two calls of `trim_heap`
M_ARENA_MAX = -8  # a parameter of glibc's mallopt


def exit_on_sigterm(status: int = 0) -> None:
    """Exit with `status` on SIGTERM, until the service sets its own handler.

    Importing a service takes seconds. The first process of a container ignores signals without a handler: a SIGTERM
    in that time would be lost, and the service would run until it is killed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident memory. private: heaps and stacks. shared: pages in use of the KV pool and the host tier."""

    private_bytes: int = 0
    shared_bytes: int = 0


def resident(pid: int | str = "self") -> Resident:
    """Read the resident memory of a process; zeros when it is gone, or without Linux's /proc."""
    with contextlib.suppress(OSError, KeyError):
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return Resident(*(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem")))
    return Resident()


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
