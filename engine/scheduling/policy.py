"""Scheduling policies: the order of service, who is admitted and who is preempted. An extension point.

A policy is a class without arguments, chosen by `--scheduling-policy module:Class` (`engine/custom_policies`). Its
methods are pure functions of small read-only views: no I/O, no clock, no state. The scheduler asks each of them only
when its answer matters, so that a policy costs nothing in steps in which nobody waits. It cannot cause a deadlock or
a livelock, whatever it answers: see docs/decisions/scheduling-and-preemption.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from engine.kv.manager import KVManager
from engine.request import Request
from engine.scheduling.order import Rank, ServiceOrder
from engine.scheduling.request_queues import RequestQueues


@dataclass(frozen=True, slots=True)
class RequestView:
    """Read-only view of a request."""

    priority: int  # lower is more urgent
    arrival: int  # 0, 1, 2, ...: a clock that ticks once per request
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int  # most output tokens that it may have
    num_computed_tokens: int = 0  # their KV exists
    num_preemptions: int = 0
    due: float = math.inf  # seconds on a clock of the worker's, when the next token is due; inf: no objective


@dataclass(frozen=True, slots=True)
class EngineView:
    """Read-only view of the engine."""

    num_free_blocks: int  # cached ones included, because they can be evicted
    num_blocks: int
    block_size: int  # tokens
    num_running: int
    num_waiting: int  # swapped ones included


class SchedulingPolicy(Protocol):
    """Whom to serve first, whom to admit, and who gives way to whom."""

    def key(self, request: RequestView) -> Rank:
        """Rank of a request: the smallest is served first; when blocks run out, the largest gives way.

        Asked once, when the request arrives. Of equal keys the earlier arrival comes first.
        """
        ...

    def admits(self, request: RequestView, engine: EngineView) -> bool:
        """Whether the first in line may start now, though there is room; those behind it wait with it.

        Not asked when nothing runs: then the request starts.
        """
        ...

    def preempts(self, newcomer: RequestView, other: RequestView) -> bool:
        """Whether `newcomer` takes the place of a running request, or passes a swapped one, that ranks behind it."""
        ...


class PolicyOrder(ServiceOrder):
    """The order of service by a policy, as the scheduler asks it."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy

    def rank(self, request: Request) -> Rank:
        """The policy's key, made unique by the order of arrival."""
        return (*self._policy.key(_view(request)), request.arrival)

    def admits(self, request: Request, queues: RequestQueues, kv: KVManager) -> bool:
        num_waiting = len(queues.waiting) + len(queues.swapped)
        pool = kv.pool
        engine = EngineView(pool.num_available, pool.num_blocks, kv.block_size, queues.num_active, num_waiting)
        return self._policy.admits(_view(request), engine)

    def gives_way(self, other: Request, newcomer: Request) -> bool:
        return newcomer.rank < other.rank and self._policy.preempts(_view(newcomer), _view(other))


def _view(request: Request) -> RequestView:
    return RequestView(
        request.priority,
        request.arrival,
        request.num_prompt_tokens,
        len(request.output_token_ids),
        request.params.max_tokens,
        request.num_computed_tokens,
        request.num_preemptions,
        request.due,
    )
