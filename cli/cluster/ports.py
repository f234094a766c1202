"""Checks and reserves ports of this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import deque

from common.errors import ConfigError
from common.net.hosts import socket_family

LOOPBACK = "127.0.0.1"
MAX_RESERVED = 128
_reserved: deque[int] = deque()  # open descriptors; the oldest are closed beyond MAX_RESERVED


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """Raise ConfigError if nobody can listen on the port."""
    with socket.socket(socket_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = f"port {port} on {host} can't be used ({str(error.strerror).lower()})"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"{reason}: {host} is no address of this machine") from error
            stop = "stop what listens there, or " if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"{reason}: {stop}choose another with {flag}") from error


def free_ports(count: int) -> range:
    """Reserve `count` consecutive loopback ports for services that this process starts."""
    while True:
        first = _reserve(0)
        with contextlib.suppress(OSError, OverflowError):  # one of the next ports is taken or does not exist
            for port in range(first + 1, first + count):
                _reserve(port)
            while len(_reserved) > MAX_RESERVED + count:
                os.close(_reserved.popleft())
            return range(first, first + count)


def _reserve(port: int) -> int:
    """Bind a socket to the port, or for 0 to any free port; return the port. Raises OSError when it is taken.

    The socket does not listen. While it is open, the kernel gives the port neither to another caller nor to an
    outgoing connection; a service can still listen there, since servers set SO_REUSEADDR.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((LOOPBACK, port))
    except BaseException:  # Ctrl-C and cancelled tasks, too: the socket must not stay open
        probe.close()
        raise
    bound_port = int(probe.getsockname()[1])
    _reserved.append(probe.detach())
    return bound_port
