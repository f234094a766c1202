import logging
import socket

from common.process import NOTIFY_SOCKET
from worker.start_progress.reports import StartReports


def test_the_supervisor_hears_all_and_the_log_says_it_now_and_then(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    times = iter([0.0, 9.0, 11.0, 12.0, 30.0, 31.0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "s"))
        supervisor.settimeout(5.0)
        monkeypatch.setenv(NOTIFY_SOCKET, str(tmp_path / "s"))
        report = StartReports(lambda: next(times))
        for part in (0.3, 0.412, 0.5, None):
            report("loading weights", part)
        heard = [supervisor.recv(100) for _ in range(4)]
    assert heard == [b"STATUS=loading weights%s\n" % part for part in (b": 30%", b": 41%", b": 50%", b"")]
    assert [record.message for record in caplog.records] == ["loading weights: 41%", "loading weights"]
    report("nobody listens", 1.0)
