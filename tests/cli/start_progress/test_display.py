import io

from rich.console import Console

from cli.start_progress.display import ProgressDisplay


def rendered(display):
    out = io.StringIO()
    Console(file=out, width=100).print(display)
    return [line.split() for line in out.getvalue().splitlines()]


def test_the_table_shows_what_a_service_does_until_it_is_ready(capsys):
    display = ProgressDisplay(["decode-0", "router"], show_logs=False)
    display.state("decode-0", "starting")
    display.status("decode-0", "loading weights: 41%")
    waiting, _ = rendered(display)
    assert waiting[:2] + waiting[-3:] == ["decode-0", "starting", "loading", "weights:", "41%"]
    display.state("decode-0", "ready")
    assert "weights:" not in rendered(display)[0]


def test_without_a_terminal_there_is_a_line_now_and_then(capsys, monkeypatch):
    display = ProgressDisplay(["decode-0"], show_logs=False)
    display.status("decode-0", "loading weights: 1%")
    monkeypatch.setattr("cli.start_progress.display.STATUS_SECONDS", 0.0)
    display.status("decode-0", "loading weights: 41%")
    assert capsys.readouterr().err == "serve    | decode-0: loading weights: 41%\n"
