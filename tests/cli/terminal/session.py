"""A program on a pseudo terminal, and the keyboard and screen of the person who uses it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.cli.terminal.screen import Screen

NUM_ROWS = 40  # of the terminal; the screen keeps those that scroll away
# The terminal becomes the program's own, so that Ctrl-C reaches it.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"


def _without_size(env: Mapping[str, str]) -> dict[str, str]:
    """pytest-xdist sets the size of its own terminal, which programs believe."""
    return {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}


class Session:
    """Context manager. `raw` is all that the program wrote to the terminal."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], columns: int = 80) -> None:
        self.raw = ""
        self.screen = Screen(columns)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ours, self._theirs = pty.openpty()
        self.resize(columns)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            stdin=self._theirs, stdout=self._theirs, stderr=self._theirs, start_new_session=True,
            env={**_without_size(os.environ), "TERM": "xterm-256color", **_without_size(env)},
        )  # fmt: skip

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    @property
    def mode(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def resize(self, columns: int) -> None:
        self.screen.columns = columns
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", NUM_ROWS, columns, 0, 0))

    def suspend_and_continue(self, is_waiting: bool = True) -> None:
        """Send Ctrl-Z and `fg`; the shell in between sets a mode with echo.

        Args:
            is_waiting: The program sits in a system call, which the signal ends. Otherwise the signal may come just
                before such a call, after the interpreter's last look for signals: its handler runs when the call
                returns, and a second signal ends the call. The same holds for Ctrl-C right after this one's handler.
        """
        os.kill(self.process.pid, signal.SIGSTOP)
        mode = self.mode
        mode[3] |= termios.ECHO | termios.ICANON
        termios.tcsetattr(self._theirs, termios.TCSANOW, mode)
        os.kill(self.process.pid, signal.SIGCONT)
        if not is_waiting:
            self._read(0.5)
            os.kill(self.process.pid, signal.SIGCONT)
        self.wait_for(lambda: not self.mode[3] & termios.ECHO)
        if not is_waiting:
            self._read(0.5)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, condition: Callable[[], object] | str, seconds: float = 100.0) -> None:
        """Show output until the condition holds; a text must be on the screen."""
        deadline = time.monotonic() + seconds
        while not (condition in self.screen.text if isinstance(condition, str) else condition()):
            assert time.monotonic() < deadline, (
                f"no {condition!r} in\n{self.screen.text.strip()}\n{self.raw[-2000:]!r}"
            )
            self._read(0.05)

    def wait(self, seconds: float = 100.0) -> int:
        """Wait for the end; return the exit code."""
        self.wait_for(lambda: self.process.poll() is not None, seconds)
        self._read(0.0)
        return self.process.wait()

    def _read(self, seconds: float) -> None:
        while select.select([self._ours], [], [], seconds)[0]:
            text = self._decoder.decode(os.read(self._ours, 65536))
            self.raw += text
            for _ in self.screen.feed(text):  # where is the cursor?
                self.type(f"\x1b[{min(self.screen.row + 1, NUM_ROWS)};{self.screen.column + 1}R")
            seconds = 0.0
