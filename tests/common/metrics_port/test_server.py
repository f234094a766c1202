"""The port for Prometheus: the same names for every scraper."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from common.errors import ConfigError
from common.metrics import MetricSet
from common.metrics_port.server import serve_scrapes
from tests.harness.clients import get
from tests.harness.cluster import free_ports

ACCEPTS = [
    "*/*",
    "text/plain;version=0.0.4",
    # Prometheus 2.42, and 3.x
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.2",
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    metrics = MetricSet({"model_name": "m"})
    metrics.counter("vllm:generation_tokens").inc(3)
    [port] = free_ports(1)
    close = serve_scrapes(metrics.render, "127.0.0.1", port)
    with pytest.raises(ConfigError, match=f"port {port} is taken"):
        serve_scrapes(metrics.render, "127.0.0.1", port)
    yield f"http://127.0.0.1:{port}"
    close()


@pytest.mark.parametrize("accept", ACCEPTS)
def test_every_scraper_gets_the_documented_names(accept: str, url: str) -> None:
    answer = get(f"{url}/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'vllm:generation_tokens_total{model_name="m"} 3.0' in answer.text.splitlines()


def test_a_client_that_leaves_is_not_worth_a_line(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        # Few connections at once: the kernel drops those beyond the queue, and they are retried after a second.
        assert get(f"{url}/metrics").status_code == 200
    lines = capfd.readouterr().err.splitlines()
    assert not [line for line in lines if "chttp2_transport" not in line]  # gRPC's threads of other tests


def test_other_paths_are_not_found(url: str) -> None:
    assert get(f"{url}/favicon.ico").status_code == 404


def test_a_service_that_is_too_busy_to_answer_says_so() -> None:
    def too_busy() -> bytes:
        raise TimeoutError

    [port] = free_ports(1)
    close = serve_scrapes(too_busy, "127.0.0.1", port)
    try:
        assert get(f"http://127.0.0.1:{port}/metrics").status_code == 503
    finally:
        close()
