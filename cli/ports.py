"""Checks for free ports of this machine."""

from __future__ import annotations

import os
import socket

from common.errors import ConfigError

LOOPBACK = "127.0.0.1"


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """Raise ConfigError when the port cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} can't be used ({os.strerror(error.errno or 0).lower()}): stop what listens "
                f"there, or choose another with {flag}"
            ) from error


def free_ports(count: int) -> list[int]:
    """`count` different loopback ports that nobody listens on right now."""
    probes = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    try:
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
