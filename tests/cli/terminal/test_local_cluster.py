"""`mini-infer chat` on a pseudo terminal, with a real cluster of its own."""

import sys

from tests.cli.terminal.session import CTRL_C, CTRL_D, ENTER, Session
from tests.harness.served import FLAGS, assert_gone, environment, session_pids, tmp_path  # noqa: F401


def test_a_cluster_is_announced_started_with_progress_and_taken_away(tmp_path):  # noqa: F811
    command = [sys.executable, "-m", "cli", "chat", *FLAGS, "--prefill=0", "--host-tier-gb=0", "--max-tokens=2000"]
    env = environment(tmp_path) | {"XDG_STATE_HOME": str(tmp_path)}
    with Session(command, env, columns=120) as session:
        session.wait_for("a tiny random model on this machine's CPU, 0 prefill, 1 decode;")
        session.type("hello")
        session.wait_for("> hello", seconds=200.0)
        assert "loading weights: 100%" in session.raw
        assert "warming up" in session.raw
        assert "loading" not in session.screen.text
        session.type(ENTER)
        session.wait_for(lambda: session.screen.row > 12 or "tokens/s" in session.screen.text)
        session.type(CTRL_C)
        session.wait_for(lambda: session.screen.text.rstrip().endswith("\n>"))  # stopped, or ended by itself before
        session.type(CTRL_D)
        assert session.wait() == 0
    assert_gone(lambda: session_pids(str(tmp_path)))
