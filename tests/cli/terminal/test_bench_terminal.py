"""`mini-infer bench` on a pseudo terminal."""

import re
import sys

from tests.cli.terminal.session import Session


def test_requests_speed_and_failures_are_shown_while_it_runs(server):
    flags = ["--url", server.url, "--model=m", "--num-requests=2", "--concurrency=1", "--warmup=1"]
    with Session([sys.executable, "-m", "cli", "bench", *flags], {}, columns=100) as session:

        def shows(pattern):
            return lambda: re.search(pattern, session.screen.text)

        session.wait_for("warming up")
        server.pieces.put(None)
        for _ in range(500):
            server.pieces.put("a")
        session.wait_for(shows(r"requests .* 0/2 [1-9]\d* tok/s, 0 failed 0:0\d:\d\d"))
        server.pieces.put(None)
        session.wait_for(shows(r"requests .* 1/2 .* tok/s, 0 failed"))
        server.pieces.put(None)
        assert session.wait() == 0
        assert "2/2 requests in" in session.screen.text
        assert "warming up" not in session.screen.text
