"""The order of service: which request goes first, is admitted, or gives way. Wings define other orders."""

from __future__ import annotations

from engine.kv.manager import KVManager
from engine.request import Request
from engine.scheduling.request_queues import RequestQueues

Rank = tuple[float, ...]


class ServiceOrder:
    """First come, first served, regardless of priorities. No request gives way to a newcomer."""

    def take_change(self) -> bool:
        """Whether all requests have to be ranked again. Called before each step; resets itself."""
        return False

    def rank(self, request: Request) -> Rank:
        """Return the request's rank. The smallest is served first, the largest is preempted first; no two are equal.

        Called once, when the request arrives.
        """
        return (request.arrival,)

    def admits(self, request: Request, queues: RequestQueues, kv: KVManager) -> bool:
        """Whether the first request in line may start now, even if there is room; later ones wait with it.

        Not called if no request is running: then it starts.
        """
        return True

    def gives_way(self, other: Request, newcomer: Request) -> bool:
        """Whether `newcomer` may displace `other`. It must have the smaller rank, so no two displace each other."""
        return False
