"""The order of service: who goes first, who is admitted and who gives way. Priorities and policies have others."""

from __future__ import annotations

from engine.kv.manager import KVManager
from engine.request import Request
from engine.scheduling.request_queues import RequestQueues

Rank = tuple[float, ...]


class ServiceOrder:
    """First come, first served, whatever the priority says. Nobody gives way to a newcomer."""

    def take_change(self) -> bool:
        """Whether all requests are to be ranked anew, once: asked before each step."""
        return False

    def rank(self, request: Request) -> Rank:
        """The smallest is served first; when blocks run out, the largest gives way. No two are equal.

        Asked once, when the request arrives.
        """
        return (request.arrival,)

    def admits(self, request: Request, queues: RequestQueues, kv: KVManager) -> bool:
        """Whether the first in line may start now, though there is room; those after it wait with it.

        Not asked when nothing runs: then the request starts.
        """
        return True

    def gives_way(self, other: Request, newcomer: Request) -> bool:
        """Whether `newcomer` goes before `other`. Only ever down the ranks: no two can displace each other."""
        return False
