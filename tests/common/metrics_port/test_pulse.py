"""Readiness of a gRPC server by HTTP, on the metrics port."""

import time

from cli.cluster.ports import free_ports
from common.metrics_port import pulse
from common.metrics_port.pulse import Pulse
from common.metrics_port.server import serve_scrapes
from common.net.healthcheck import is_ready
from common.net.rpc import RpcServer
from tests.harness.waiting import until


async def test_grpc_and_http_follow_the_service(monkeypatch):
    monkeypatch.setattr(pulse, "SILENT_SECONDS", 60.0)
    server = RpcServer("127.0.0.1", 0, token="secret")  # health needs no token
    [port] = free_ports(1)
    close = serve_scrapes(bytes, "127.0.0.1", port, Pulse(server))
    url = f"http://127.0.0.1:{port}/readyz"
    assert not await is_ready(url)
    await server.start()
    try:
        for serving in (True, False, True):
            await server.health.set_serving(serving)
            assert await is_ready(server.address, timeout_seconds=60.0) is serving
            assert await is_ready(url, timeout_seconds=60.0) is serving
    finally:
        await server.stop(0.0)
        close()


async def test_a_service_whose_event_loop_stands_still_is_not_ready(monkeypatch):
    monkeypatch.setattr(pulse, "SILENT_SECONDS", 0.6)
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.01)
    server = RpcServer("127.0.0.1", 0)
    ready = Pulse(server)
    await server.start()
    try:
        await server.health.set_serving(True)
        await until(ready)
        time.sleep(0.8)  # noqa: ASYNC251
        assert not ready()
        await until(ready)
    finally:
        await server.stop(0.0)
