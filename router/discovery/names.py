"""Resolves host names of workers every few seconds: each address of a name is one worker."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from common.net.hosts import with_port

logger = logging.getLogger(__name__)
RESOLVE_INTERVAL_SECONDS = 3.0
Name = tuple[str, str, int]  # role, host, port
SetAddresses = Callable[[set[tuple[str, str]], bool], None]  # workers as (role, host:port); whether these are all


async def follow_names(names: Sequence[Name], set_addresses: SetAddresses) -> None:
    """Resolve the names repeatedly until cancelled."""
    while True:
        await asyncio.sleep(RESOLVE_INTERVAL_SECONDS)
        set_addresses(*await resolved(names))


async def resolved(names: Sequence[Name]) -> tuple[set[tuple[str, str]], bool]:
    """Return the workers that the names resolve to now, and whether every name has resolved."""
    wanted: set[tuple[str, str]] = set()
    are_all = True
    for role, host, port in names:
        addresses = await _addresses(host, port)
        are_all = are_all and bool(addresses)
        wanted |= {(role, address) for address in addresses}
    return wanted, are_all


async def _addresses(host: str, port: int) -> list[str]:
    """Return `host:port` for each address of `host`; empty if the name does not resolve now."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        logger.debug("cannot resolve %s: %s", host, error)
        return []
    hosts = {str(item[4][0]) for item in found}
    if host == "localhost":  # one machine with several addresses
        hosts = {"127.0.0.1"} if "127.0.0.1" in hosts else hosts
    return [with_port(item, port) for item in sorted(hosts)]
