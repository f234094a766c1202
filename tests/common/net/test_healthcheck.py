import asyncio
import socketserver
import subprocess
import sys
import threading

import pytest

from common.net import healthcheck
from common.net.healthcheck import is_ready, main
from common.net.rpc import RpcServer


async def http_server(reply: bytes | None):
    """Start a server that answers one request, or never (None); the event is set when its connection is closed."""
    closed = asyncio.Event()

    async def answer(reader, writer):
        try:
            await reader.readuntil(b"\r\n\r\n")
            if reply is None:
                await reader.read()  # until the client has had enough
            else:
                writer.write(reply)
        finally:
            writer.close()
            await writer.wait_closed()
            closed.set()

    return await asyncio.start_server(answer, "127.0.0.1", 0), closed


@pytest.mark.parametrize(
    ("reply", "ready"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"200 is no status line\r\n", False),
        (b"", False),
        (None, False),
    ],
)
async def test_http(reply, ready):
    server, closed = await http_server(reply)
    async with server:
        port = server.sockets[0].getsockname()[1]
        timeout = 0.2 if reply is None else 30.0
        assert await is_ready(f"http://127.0.0.1:{port}/readyz", timeout_seconds=timeout) is ready
        await closed.wait()


async def test_grpc_follows_the_service():
    server = RpcServer("127.0.0.1", 0, token="secret")  # health needs no token
    await server.start()
    try:
        for serving in (True, False, True):
            await server.health.set_serving(serving)
            assert await is_ready(server.address, timeout_seconds=60.0) is serving
    finally:
        await server.stop(0.0)


def test_nobody_listens_is_exit_code_1(capsys):
    assert main(["127.0.0.1:1"]) == 1
    assert main(["http://127.0.0.1:1/readyz"]) == 1
    assert main(["http://127.0.0.1:port/readyz"]) == 1
    assert "is not ready" in capsys.readouterr().err
    assert main([]) == 2


def test_the_file_runs_by_its_path_without_site_packages():
    """Compose runs it so: for HTTP it imports little, all from the standard library."""
    with socketserver.TCPServer(("127.0.0.1", 0), Ok) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/readyz"
        command = [sys.executable, "-I", "-S", "-X", "importtime", healthcheck.__file__, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert "asyncio" not in done.stderr
    assert "argparse" not in done.stderr


class Ok(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.recv(1000)
        self.request.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
