"""Signals of the keyboard, in the process of the test itself."""

import os
import pty
import signal

import pytest

from cli.terminal.keys import interrupted_once, keys_kept


def test_ctrl_c_stops_an_answer_once_and_does_nothing_around_it():
    ours, theirs = pty.openpty()
    before = signal.getsignal(signal.SIGINT)
    try:
        with keys_kept(theirs):
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt), interrupted_once():
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        os.close(ours)
        os.close(theirs)
