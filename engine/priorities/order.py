"""The order of service by priority: `--scheduling-policy priority`, the default."""

from __future__ import annotations

from engine.request import Request
from engine.scheduling.order import Rank, ServiceOrder


class PriorityOrder(ServiceOrder):
    """Lower `priority` first, and at once: it takes the place of a higher one.

    Among equal priorities those whose next token is due first: requests with slack wait for those at risk. Without
    objectives, first come, first served.
    """

    def rank(self, request: Request) -> Rank:
        return (request.priority, request.due, request.arrival)

    def gives_way(self, other: Request, newcomer: Request) -> bool:
        return newcomer.priority < other.priority
