"""Checks for free ports of this machine."""

from __future__ import annotations

import errno
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
            reason = f"port {port} on {host} can't be used ({str(error.strerror).lower()})"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"{reason}: {host} is no address of this machine") from error
            stop = "stop what listens there, or " if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"{reason}: {stop}choose another with {flag}") from error


def free_ports(count: int) -> list[int]:
    """`count` different loopback ports that nobody listens on right now."""
    probes = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    try:
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
