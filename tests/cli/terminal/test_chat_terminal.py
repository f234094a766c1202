"""`mini-infer chat` on a pseudo terminal, against a server whose tokens come when the test sends them."""

import sys
from contextlib import contextmanager
from queue import Queue

from tests.cli.terminal.session import CTRL_C, CTRL_D, ENTER, Session


@contextmanager
def chat(server, tmp_path, *flags, columns=40):
    command = [sys.executable, "-m", "cli", "chat", "--url", server.url, *flags]
    with Session(command, {"XDG_STATE_HOME": str(tmp_path)}, columns) as session:
        mode = session.mode
        session.wait_for(lambda: ">" in session.screen.rows)
        yield session
        session.type(CTRL_D)
        assert session.wait() == 0
        assert session.mode == mode, "the terminal is not as it was"


def say(server, *pieces):
    for piece in pieces:
        server.pieces.put(piece)


def test_an_answer_is_wrapped_and_keys_typed_meanwhile_go_to_the_next_prompt(server, tmp_path):
    with chat(server, tmp_path) as session:
        session.type("hi there" + ENTER)
        session.wait_for("waiting for the first token")
        session.type("first")
        say(server, "The **qui", "ck** brown fox jum", "ps over the la", "zy dog. ")
        session.wait_for("dog.")
        session.type(" line" + ENTER + "second li")
        session.resize(24)
        say(server, "It does so ", "again and again.\n\n- one\n- `two`", None)
        assert server.questions.get(timeout=60) == "hi there"
        assert server.questions.get(timeout=60) == "first line"
        shown = session.screen
        session.wait_for("> first line")
        at = next(number for number, row in enumerate(shown.rows) if row == "> hi there")
        assert shown.rows[at + 1 :][:7] == [
            "The quick brown fox jumps over the lazy", "dog. It does so again", "and again.", "", "- one", "- two",
            "> first line",
        ]  # fmt: skip
        assert session.raw.count("brown") == session.raw.count("again.") == 1, "text was painted again"
        say(server, "Yes.", None)
        session.wait_for("> second li")
        assert "waiting" not in shown.text
        session.type("\x15")  # Ctrl-U: nothing of it is left


def test_ctrl_c_stops_the_answer_and_not_the_program(server, tmp_path):
    with chat(server, tmp_path, "--dry-run") as session:
        assert f"tiny on {server.url}" in session.screen.text
        session.type("count" + ENTER)
        session.wait_for("waiting")
        for _ in range(20):  # the spinner's thread must not take the signal
            session.suspend_and_continue()
        say(server, "one two thr")
        session.wait_for("one two")
        session.suspend_and_continue(is_waiting=False)
        session.type("kept" + CTRL_C + CTRL_C)
        session.wait_for("(stopped)")
        assert "one two thr\n(stopped)" in session.screen.text
        session.wait_for("> kept")
        while not server.was_cancelled.wait(0.01):
            server.pieces.put("more")
        server.pieces = Queue()
        session.type(ENTER)
        session.wait_for("waiting")
        session.type(CTRL_C)
        session.wait_for(lambda: session.screen.text.count("(stopped)") == 2)
        assert "waiting" not in session.screen.text
        assert session.raw.count("\x1b[?25h") >= session.raw.count("\x1b[?25l"), "the cursor is still hidden"
