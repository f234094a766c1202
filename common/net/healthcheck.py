"""Readiness probe: `python -m common.net.healthcheck TARGET` exits with 0 when the service is ready, else with 1.

TARGET is `host:port` (gRPC health, SERVING) or an http:// address that must answer 200. A service that does not
answer in time is not ready; the reason is not reported. `mini-infer serve` probes by gRPC while it starts. Compose
runs this file by its path, `python -I -S .../healthcheck.py http://...`, several times a minute as long as a
container lives, so the probe over HTTP imports next to nothing.
"""

from __future__ import annotations

import socket
import sys

DEFAULT_TIMEOUT_SECONDS = 2.0
MAX_REPLY_BYTES = 1 << 16


async def is_ready(target: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> bool:
    """Probe the target once. Raises nothing that a peer or the network causes."""
    if target.startswith("http://"):
        import asyncio

        return await asyncio.to_thread(http_ready, target, timeout_seconds)
    return await _grpc_ready(target, timeout_seconds)


def http_ready(url: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> bool:
    """Probe an http:// address once. timeout_seconds: for each of connecting, sending and reading."""
    authority, _, path = url.removeprefix("http://").partition("/")
    host, colon, port = authority.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = authority, "80"
    request = f"GET /{path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n"
    reply = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_seconds) as connection:
            connection.sendall(request.encode())
            while len(reply) < MAX_REPLY_BYTES and (piece := connection.recv(4096)):
                reply += piece
    except (OSError, ValueError):  # a timeout is an OSError
        return False
    return reply.startswith(b"HTTP/1.") and reply[8:12] == b" 200"


async def _grpc_ready(address: str, timeout_seconds: float) -> bool:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_seconds
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 if ready, 1 if not, 2 for a wrong command line."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: healthcheck TARGET    (host:port of a gRPC service, or http://host:port/path)", file=sys.stderr)
        return 2
    [target] = arguments
    if target.startswith("http://"):
        ready = http_ready(target)
    else:
        import asyncio

        ready = asyncio.run(is_ready(target))
    if not ready:
        print(f"{target} is not ready", file=sys.stderr)
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main())
