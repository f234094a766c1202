"""The keyboard while an answer is shown: keys wait for the next prompt, Ctrl-C stops the answer."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LFLAG, IFLAG, CONTROL = 3, 0, 6  # indexes of the result of termios.tcgetattr


@contextmanager
def keys_kept(fd: int) -> Iterator[None]:
    """Show no typed keys, and keep them for the next prompt, which shows them.

    Ctrl-C and Ctrl-Z still send their signals, but do not discard what was typed before. Ctrl-C does nothing outside
    of `interrupted_once`: stopping an answer that has just ended must not end the program. A prompt that switches the
    terminal to its own mode must restore it. Call it in the main thread.
    """
    before = termios.tcgetattr(fd)
    mode = termios.tcgetattr(fd)
    mode[LFLAG] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    mode[LFLAG] |= termios.NOFLSH
    mode[IFLAG] &= ~termios.ICRNL  # prompts expect \r for the Enter key
    mode[CONTROL][termios.VMIN] = 1

    def on_continue(_number: int, _frame: FrameType | None) -> None:
        """Restore the mode after Ctrl-Z and `fg`: the shell may have set one with echo, unlike our prompts."""
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
    """Let threads started inside the context receive no signals.

    Handlers run in the main thread. If another thread receives the signal, that is only after the system call in
    which the main thread waits has ended.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt; further ones must not end the program."""
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
