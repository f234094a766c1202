"""The router as a process: its metrics port, and the API key of its main port."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.harness.clients import get
from tests.harness.cluster import Service, free_ports, service_environment
from tests.harness.waiting import wait_until

METRICS_HOST = "127.0.0.2"  # another address of this machine than --host


def start(port: int, metrics_port: int, log: Path) -> Service:
    flags = [f"--port={port}", f"--metrics-port={metrics_port}", "--decode=127.0.0.1:1", "--api-key=secret"]
    router = Service("router", ["router", "--model=dry-run", *flags, f"--metrics-host={METRICS_HOST}"], log)
    router.start(service_environment())
    return router


@pytest.mark.wing("common.metrics_port")
def test_metrics_can_be_scraped_without_the_key(tmp_path: Path) -> None:
    port, metrics_port = free_ports(2)
    router = start(port, metrics_port, tmp_path / "log")
    try:
        wait_until(lambda: "router ready" in router.log())
        assert get(f"http://127.0.0.1:{port}/metrics").status_code == 401
        of_key = get(f"http://127.0.0.1:{port}/metrics", headers={"authorization": "Bearer secret"})
        answer = get(f"http://{METRICS_HOST}:{metrics_port}/metrics")
        with pytest.raises(httpx.ConnectError):
            get(f"http://127.0.0.1:{metrics_port}/metrics")
        assert answer.status_code == of_key.status_code == 200
        assert 'mini_infer_workers{model_name="dry-run",role="decode",state="connecting"} 1.0' in answer.text

        def names(text: str) -> list[str]:
            return [line for line in text.splitlines() if line.startswith("# TYPE")]

        assert names(answer.text) == names(of_key.text)
        assert get(f"http://{METRICS_HOST}:{metrics_port}/v1/models").status_code == 404
        router.signal(signal.SIGTERM)
        assert router.wait(60.0) == 0
    finally:
        router.kill()


@pytest.mark.wing("common.metrics_port")
def test_a_metrics_port_that_is_taken_is_named(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with socket.create_server((METRICS_HOST, 0)) as taken:
        metrics_port = taken.getsockname()[1]
        router = start(port, metrics_port, tmp_path / "log")
        assert router.wait(120.0) == 1
    assert (
        router.log() == f"router: port {metrics_port} is taken or not allowed: choose another with --metrics-port\n"
    )
