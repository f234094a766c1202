import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from common.wait_for import main
from tests.harness.processes import command_with_signal


def test_a_path_that_is_there_or_comes(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    assert main([str(path)]) == 0
    later = tmp_path / "later"
    threading.Timer(0.3, later.mkdir).start()
    began = time.monotonic()
    assert main([str(later), "--seconds=200"]) == 0
    assert time.monotonic() - began < 100


@pytest.mark.parametrize("left_behind", [False, True])
def test_a_socket_counts_when_somebody_listens(tmp_path, capsys, left_behind):
    path = tmp_path / "agent.sock"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    if left_behind:
        server.close()
        assert main([str(path), "--seconds=0.6", "--hint=See its log."]) == 1
        said = capsys.readouterr().err.splitlines()
        assert said[-1] == f"gave up after 1 s: {path}: nobody accepts connections (connection refused). See its log."
    else:
        server.listen(1)
        with server:
            assert main([str(path)]) == 0


def test_it_says_what_is_missing_and_gives_up(tmp_path, capsys):
    assert main([str(tmp_path / "agent.sock"), "--seconds=0.2", "--hint=The agent makes it."]) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("waiting up to")
    assert last.endswith("agent.sock: no such file or directory. The agent makes it.")


def test_sigterm_ends_it_though_a_container_s_first_process_ignores_what_it_does_not_handle(tmp_path):
    command = [sys.executable, "-m", "common.wait_for", str(tmp_path / "model"), "--seconds=600"]
    ignoring = command_with_signal(signal.SIGTERM, signal.SIG_IGN, command)
    with subprocess.Popen(ignoring, stderr=subprocess.PIPE) as process:
        assert process.stderr
        assert process.stderr.readline().startswith(b"waiting")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
