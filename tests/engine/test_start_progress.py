import io
import sys

from engine import LLM


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_model_loaded_in_process_shows_progress_in_a_terminal_alone(monkeypatch, capsys):
    LLM("dry-run", device="cpu", num_gpu_blocks=16)
    assert "loading weights" not in capsys.readouterr().err
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    LLM("dry-run", device="cpu", num_gpu_blocks=16)
    shown = terminal.getvalue()
    assert "\r\x1b[Kloading weights: 100%" in shown
    assert shown.endswith("\r\x1b[K"), "a trace is left"
