"""`mini-infer serve`, run by its command, with real services on the dry-run model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cli.cluster.ports import free_ports
from tests.harness.clients import get, post
from tests.harness.processes import command_line, descendants, is_alive
from tests.harness.waiting import wait_until

SMALL = ["--dry-run", "--num-gpu-blocks=256", "--num-threads=1"]
FLAGS = [*SMALL, "--host-tier-gb=0.01"]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A shorter path than pytest's, because paths of sockets in it are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="mi-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cli", *arguments]


def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}


def finished(tmp_path: Path, *arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    env = environment(tmp_path) | variables
    return subprocess.run(
        command(*arguments), input=stdin, capture_output=True, text=True, timeout=200, env=env, check=False
    )


def session_pids(text: str) -> list[int]:
    """Return the processes whose command line contains `text`."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in numbers if text in command_line(pid) and is_alive(pid)]


def assert_gone(find: Callable[[], list[int]]) -> None:
    """Wait until `find` finds no process: after SIGKILL a process takes a moment to end."""
    wait_until(lambda: not find(), message=lambda: [command_line(pid) for pid in find()])


class Served:
    """A running `mini-infer serve` with all its output."""

    def __init__(
        self, tmp_path: Path, *flags: str, api_key: str = "", program: Sequence[str] = (), size: Sequence[str] = FLAGS
    ) -> None:
        """program: an installed one, run in `tmp_path` without this process's PYTHONPATH. size: the first flags."""
        (self.port,) = free_ports(1)
        self.api_key = api_key
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tmp_path / "serve.log"
        env = environment(tmp_path) | ({"MINI_INFER_API_KEY": api_key} if api_key else {})
        if program:
            env.pop("PYTHONPATH", None)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*(program or command("serve")), *size, f"--port={self.port}", *flags],
                stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True,
                cwd=tmp_path if program else None,
            )  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """The processes of all services and their children."""
        return descendants(self.process.pid)

    def wait_for(self, pattern: str, seconds: float = 200.0) -> str:
        """Wait until the output matches `pattern`; return all of it."""

        def is_told_or_over() -> bool:
            is_over = self.process.poll() is not None
            return re.search(pattern, self.log.read_text()) is not None or is_over

        wait_until(is_told_or_over, seconds, lambda: self.log.read_text()[-3000:])
        text = self.log.read_text()
        assert re.search(pattern, text), f"no {pattern!r} in:\n{text[-3000:]}"
        return text

    def is_used(self, worker: str) -> bool:
        """Whether the router uses the worker, which it does soon after the worker is ready."""
        workers = get(f"{self.url}/v1/cluster").json()["workers"]
        return any(item["id"] == worker and item["state"] == "ready" for item in workers)

    def stop(self) -> None:
        """End it by SIGTERM, and check that it exits with 0. Kill it if it does not end."""
        self.process.terminate()
        try:
            code = self.process.wait(100)
        finally:
            self.process.kill()
            self.process.wait()
        assert code == 0, self.log.read_text()[-3000:]

    def complete(self) -> str:
        messages = [{"role": "user", "content": "a message of many tokens, of one byte each " * 2}]
        body = {"model": "dry-run", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        reply = post(f"{self.url}/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]["content"]
