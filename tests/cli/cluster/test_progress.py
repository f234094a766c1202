import io
import sys

import pytest
from rich.console import Console

from cli.cluster.progress import StartDisplay


def rendered(display):
    out = io.StringIO()
    Console(file=out, width=100).print(display)
    return [line.split() for line in out.getvalue().splitlines()]


def test_the_table_shows_what_a_service_does_until_it_is_ready(capsys):
    display = StartDisplay(["decode-0", "router"], show_logs=False)
    display.state("decode-0", "starting")
    display.status("decode-0", "loading weights: 41%")
    waiting, _ = rendered(display)
    assert waiting[:2] + waiting[-3:] == ["decode-0", "starting", "loading", "weights:", "41%"]
    display.state("decode-0", "ready")
    assert "weights:" not in rendered(display)[0]


def test_without_a_terminal_there_is_a_line_now_and_then(capsys, monkeypatch):
    display = StartDisplay(["decode-0"], show_logs=False)
    display.status("decode-0", "loading weights: 1%")
    monkeypatch.setattr("cli.cluster.progress.STATUS_SECONDS", 0.0)
    display.status("decode-0", "loading weights: 41%")
    assert capsys.readouterr().err == "serve    | decode-0: loading weights: 41%\n"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_cannot_be_written_is_lost_and_serve_goes_on(log_format, monkeypatch):
    """A disk that is full while the log is written; a reader of the log that has left is told by the same errors."""
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        display = StartDisplay(["decode-0"], show_logs=True, log_format=log_format)
        with display:
            display.state("decode-0", "ready")
        for _ in range(2000):  # more than its buffer
            display.line("decode-0", "a line of its log")
        display.tell("stopping")
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()
