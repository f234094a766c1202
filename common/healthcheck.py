"""Readiness probe: `python -m common.healthcheck TARGET` exits with 0 when the service is ready, else with 1.

TARGET is `host:port` (gRPC health, SERVING) or an http:// address that must answer 200. Used by Compose,
by `mini-infer serve` while it starts, and by a person at a prompt. A service that does not answer within the
time given is not ready; nothing here says why.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress
from urllib.parse import urlsplit

DEFAULT_TIMEOUT_SECONDS = 2.0


async def is_ready(target: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> bool:
    """Probe the target once. Never raises for what a peer or the network does."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await (
                _http_ready(target) if target.startswith("http://") else _grpc_ready(target, timeout_seconds)
            )
    except OSError:  # a TimeoutError is one
        return False


async def _http_ready(url: str) -> bool:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        request = f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        status_line = await reader.readline()
        return status_line.split(b" ")[1:2] == [b"200"]
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


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
    """Exit code: 0 ready, 1 not."""
    parser = argparse.ArgumentParser(prog="healthcheck", description="Exit with 0 when TARGET is ready.")
    parser.add_argument("target", help="host:port of a gRPC service, or an http:// address")
    parser.add_argument("--timeout-seconds", type=float, default=DEFAULT_TIMEOUT_SECONDS)
    arguments = parser.parse_args(argv)
    ready = asyncio.run(is_ready(arguments.target, arguments.timeout_seconds))
    if not ready:
        print(f"{arguments.target} is not ready", file=sys.stderr)
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main())
