import sys

import pytest

from cli.cluster.progress import StartDisplay


@pytest.mark.parametrize("log_format", ["text", pytest.param("json", marks=pytest.mark.wing("common.json_logs"))])
def test_what_cannot_be_written_is_lost_and_serve_goes_on(log_format, monkeypatch):
    """The disk is full while the log is written; a closed pipe raises the same errors."""
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
