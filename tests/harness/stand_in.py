"""A small service for supervisor tests: `python -m tests.harness.stand_in MODE PORT EVENTS NAME`.

Answers every HTTP request with 200 and appends "NAME event PID" lines to the EVENTS file.
Modes: well; dies (exit 3 before it is ready); dies-later (the same, except at the first start); deaf (ignores
SIGTERM); parent (starts a child in its session).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from common.wings import has_wing


def main() -> None:
    mode, port, events, name = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]

    def note(event: str, pid: int = 0) -> None:
        with open(events, "a", encoding="utf-8") as file:
            file.write(f"{name} {event} {pid or os.getpid()}\n")

    def on_term(_number: int, _frame: object) -> None:
        note("term")
        if mode != "deaf":
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_term)
    first_time = not Path(events).exists() or f"{name} start" not in Path(events).read_text(encoding="utf-8")
    note("start")
    print(f"hello from {name}", flush=True)
    if has_wing("worker.start_progress"):
        from worker.start_progress.reports import report_status

        report_status("loading\x1b weights: 41%")
    if mode == "dies" or (mode == "dies-later" and not first_time):
        print("error: the disk is on fire", flush=True)
        sys.exit(3)
    if mode == "parent":
        note("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


if __name__ == "__main__":
    main()
