"""Processes of this machine, from /proc. Any of them, and any thread, may end while it is looked at."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Children of a process, their children and so on."""
    found = []
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def command_line(pid: int) -> str:
    """Empty: it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def until_stopped(pid: int) -> None:
    """Wait until each thread has seen SIGSTOP, or has ended."""
    deadline = time.monotonic() + 60.0
    while any(_state(task) not in "TZX" for task in _tasks(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _tasks(pid: int) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def _state(task: Path) -> str:
    with contextlib.suppress(OSError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return "X"
