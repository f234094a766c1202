"""The router as a process: its metrics port, beside the key of its main one."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.harness.cluster import ROOT, free_ports

METRICS_HOST = "127.0.0.2"  # another address of this machine than --host


def start(port: int, metrics_port: int, log: Path) -> subprocess.Popen[bytes]:
    flags = [f"--port={port}", f"--metrics-port={metrics_port}", "--decode=127.0.0.1:1", "--api-key=secret"]
    flags += [f"--metrics-host={METRICS_HOST}"]
    command = [sys.executable, "-m", "router", "--model=dry-run", *flags]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)


def test_metrics_can_be_scraped_without_the_key(tmp_path: Path) -> None:
    port, metrics_port = free_ports(2)
    router = start(port, metrics_port, tmp_path / "log")
    try:
        deadline = time.monotonic() + 120.0
        while b"router ready" not in (tmp_path / "log").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60.0).status_code == 401
        of_key = httpx.get(
            f"http://127.0.0.1:{port}/metrics", headers={"authorization": "Bearer secret"}, timeout=60.0
        )
        answer = httpx.get(f"http://{METRICS_HOST}:{metrics_port}/metrics", timeout=60.0)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=60.0)
        assert answer.status_code == of_key.status_code == 200
        assert 'mini_infer_workers{model_name="dry-run",role="decode",state="connecting"} 1.0' in answer.text

        def names(text: str) -> list[str]:
            return [line for line in text.splitlines() if line.startswith("# TYPE")]

        assert names(answer.text) == names(of_key.text)
        assert httpx.get(f"http://{METRICS_HOST}:{metrics_port}/v1/models", timeout=60.0).status_code == 404
        router.terminate()
        assert router.wait(60.0) == 0
    finally:
        router.kill()
        router.wait()


def test_a_metrics_port_that_is_taken_is_named(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with socket.create_server((METRICS_HOST, 0)) as taken:
        metrics_port = taken.getsockname()[1]
        assert start(port, metrics_port, tmp_path / "log").wait(120.0) == 1
    error = f"router: port {metrics_port} is taken or not allowed: choose another with --metrics-port\n"
    assert (tmp_path / "log").read_text() == error
