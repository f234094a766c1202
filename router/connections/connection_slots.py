"""Decides which connections to keep when there are too many. Plain counts, no I/O.

Up to `max_connections`, every connection gets a slot. Beyond them there is a reserve for addresses with few
connections, so that one address cannot shut out all others, and a few spare slots for health checks and answers 503.
When the spare slots are full, a new connection displaces the oldest of them, which has had time for its request. See
docs/decisions/http-connections.md.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Generic, TypeVar

C = TypeVar("C")
NUM_SPARE_CONNECTIONS = 64


class ConnectionSlots(Generic[C]):
    """The slots of one server. Call `enter` and `leave` once for each connection."""

    def __init__(self, max_connections: int, reserved_per_address: int) -> None:
        self._max_regular = max_connections
        self._num_reserved = max_connections // 16 if reserved_per_address else 0
        self._reserved_per_address = reserved_per_address
        self._spare: dict[C, None] = {}  # oldest first
        self._addresses: dict[C, str] = {}  # of connections in regular slots
        self._per_address: Counter[str] = Counter()

    @property
    def max_open(self) -> int:
        """Most descriptors that connections can take; one is accepted before it displaces another."""
        return self._max_regular + self._num_reserved + NUM_SPARE_CONNECTIONS + 1

    def enter(self, connection: C, host: str) -> C | None:
        """Give `connection` a slot. Return the connection to close in exchange, if any."""
        address = network_of(host)
        num_regular = len(self._addresses)
        is_few = self._per_address[address] < self._reserved_per_address
        if num_regular < self._max_regular or (is_few and num_regular < self._max_regular + self._num_reserved):
            self._addresses[connection] = address
            self._per_address[address] += 1
            return None
        oldest = next(iter(self._spare)) if len(self._spare) >= NUM_SPARE_CONNECTIONS else None
        if oldest is not None:
            del self._spare[oldest]
        self._spare[connection] = None
        return oldest

    def is_spare(self, connection: C) -> bool:
        return connection in self._spare

    def leave(self, connection: C) -> None:
        self._spare.pop(connection, None)
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]


def network_of(host: str) -> str:
    """Return the address to count by; for IPv6 the first 64 bits, which one host usually owns."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address.packed[:8] + bytes(8), 64)))
