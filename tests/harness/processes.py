"""Processes of this machine, from /proc, and how to start one with a signal ignored.

All functions cope with processes and threads that end meanwhile.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.harness.waiting import wait_until


def children(pid: int) -> list[int]:
    pids: list[int] = []
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            pids += map(int, (task / "children").read_text().split())
    return pids


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children and so on."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def followers_of(pid: int) -> list[int]:
    """Return the processes of ranks 1, 2, ... below `pid`."""
    return [child for child in descendants(pid) if ".follower" in command_line(child) + name(child)]


def name(pid: int) -> str:
    """Return the last letters of the module that a forked service runs."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def command_line(pid: int) -> str:
    """Return the command line; empty if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def is_alive(pid: int) -> bool:
    return _state(Path(f"/proc/{pid}")) not in "ZX"


def until_stopped(pid: int) -> None:
    """Wait until each thread has stopped or ended, after a SIGSTOP."""
    wait_until(lambda: all(_state(task) in "TZX" for task in _tasks(pid)))


def until_gone(*pids: int) -> None:
    """Wait until these processes have ended, and their parents have reaped them."""
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), message=lambda: pids)


def _tasks(pid: int) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def _state(task: Path) -> str:
    with contextlib.suppress(OSError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def command_with_signal(number: signal.Signals, handling: signal.Handlers, command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` with the signal ignored or not. (`preexec_fn` is unsafe with threads.)"""
    script = "import os, signal, sys; signal.signal(*map(int, sys.argv[1:3])); os.execv(sys.argv[3], sys.argv[3:])"
    return [sys.executable, "-c", script, str(int(number)), str(int(handling)), *command]
