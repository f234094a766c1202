"""`mini-infer serve` under many kills: `pytest -m soak tests/cli/cluster/test_serve_soak.py`, about 13 minutes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.harness.processes import command_line
from tests.harness.served import Served, tmp_path  # noqa: F401

MODULES = {
    "agent": " kvstore ",
    "prefill-0": " prefill_service ",
    "decode-0": " decode_service ",
    "router": " router ",
}
NUM_KILLS = 50


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_kills_of_every_role_in_a_row(tmp_path):  # noqa: F811
    """Kills all four at once, each time after all are ready again: the first one waits for the others."""
    served = Served(tmp_path)
    try:
        served.wait_for("stop with Ctrl-C")
        answer = served.complete()
        begin = time.monotonic()
        for count in range(1, NUM_KILLS + 1):
            processes = {pid: command_line(pid) for pid in served.pids}
            for module in MODULES.values():
                os.kill(next(pid for pid, text in processes.items() if module in text), signal.SIGKILL)
            deadline = time.monotonic() + 300
            while any(served.log.read_text().count(f"| {name}: ready") <= count for name in MODULES):
                assert time.monotonic() < deadline, served.log.read_text()[-3000:]
                assert served.process.poll() is None
                time.sleep(0.1)
            assert served.complete() == answer
            print(f"round {count} done {time.monotonic() - begin:.0f} s after the first kill", flush=True)
    finally:
        served.stop()
        print(served.log.read_text()[-2000:])
