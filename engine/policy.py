"""In which order requests are served. Knows no queues: a policy only gives each request its key."""

from __future__ import annotations

from typing import Protocol

from engine.request import Request


class SchedulingPolicy(Protocol):
    """Order of service: the smallest key runs first, the largest gives way first."""

    def key(self, request: Request) -> tuple[int, ...]: ...


class PriorityPolicy:
    """Lower `priority` first, then first come, first served. With equal priorities this is FCFS."""

    def key(self, request: Request) -> tuple[int, ...]:
        return (request.priority, request.arrival)
