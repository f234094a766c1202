"""Checks for free ports of this machine."""

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
_reserved: deque[int] = deque()  # descriptors, open as long as this process lives unless it takes many more


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """Raise ConfigError when the port cannot be listened on."""
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
    """Loopback ports, one after the other, for services that this process starts."""
    while True:
        first = _reserve(0)
        with contextlib.suppress(OSError, OverflowError):  # one of the next is taken, or there is none
            for port in range(first + 1, first + count):
                _reserve(port)
            while len(_reserved) > MAX_RESERVED + count:
                os.close(_reserved.popleft())
            return range(first, first + count)


def _reserve(port: int) -> int:
    """Bind a socket to the port, 0 for any that is free. Raises OSError when it is taken.

    The socket does not listen. While it is open neither another caller nor an outgoing connection is given the port;
    a service can still listen there, since servers set SO_REUSEADDR.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((LOOPBACK, port))
    except BaseException:  # Ctrl-C and cancelled tasks, too: what was opened must not stay open
        probe.close()
        raise
    found = int(probe.getsockname()[1])
    _reserved.append(probe.detach())
    return found
