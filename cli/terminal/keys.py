"""The keyboard while an answer is shown: keys wait for the next prompt, Ctrl-C stops the answer."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LFLAG, IFLAG, CONTROL = 3, 0, 6  # indexes of what termios.tcgetattr returns


@contextmanager
def keys_kept(fd: int) -> Iterator[None]:
    """Show no key that is typed, and keep them for the prompt that comes next, which shows them.

    Ctrl-C and Ctrl-Z still send their signals, without throwing away what was typed before. Ctrl-C does nothing
    outside `interrupted_once`: whoever stops an answer that has just ended must not end the program. A prompt that
    switches the terminal to its own mode must leave it as it was. Called in the main thread.
    """
    before = termios.tcgetattr(fd)
    mode = termios.tcgetattr(fd)
    mode[LFLAG] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    mode[LFLAG] |= termios.NOFLSH
    mode[IFLAG] &= ~termios.ICRNL  # the Enter key is \r for a prompt
    mode[CONTROL][termios.VMIN] = 1

    def on_continue(_number: int, _frame: FrameType | None) -> None:
        """After Ctrl-Z and `fg`: the shell may have set a mode with echo, which no prompt of ours has."""
        if os.tcgetpgrp(fd) == os.getpgrp() and termios.tcgetattr(fd)[LFLAG] & termios.ECHO:
            termios.tcsetattr(fd, termios.TCSANOW, mode)

    termios.tcsetattr(fd, termios.TCSANOW, mode)
    handlers_before = {
        signal.SIGCONT: signal.signal(signal.SIGCONT, on_continue),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda _number, _frame: None),
    }
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def signals_for_main_thread() -> Iterator[None]:
    """Let threads that are started inside take no signals.

    Handlers run in the main thread. Where another one has taken the signal, that is only when a system call in which
    the main thread waits has ended by itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt; those that an impatient user adds must not end the program."""
    is_first = True

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
