"""Selects the workers that are worth a prediction. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import Protocol, TypeVar

from kvstore.types import WorkerId
from router.routing.views import RequestView

MOST = 32  # workers of one role considered: those with the longest cached prefixes, then the least loaded


class Assignable(Protocol):
    """What is known about a worker without a prediction."""

    @property
    def worker_id(self) -> WorkerId: ...

    @property
    def assigned(self) -> tuple[int, int]:
        """Prompt tokens to compute and number of requests, as the router counts them."""


W = TypeVar("W", bound=Assignable)


def shortlist(policy: str, workers: Sequence[W], request: RequestView) -> Sequence[W]:
    """Select the workers worth a prediction, so that decisions do not take longer in larger clusters.

    The cost policy considers MOST workers: up to half by cached prefix, the rest by load. The request's turn decides
    where to begin among equal workers. Other policies choose among all workers.
    """
    if policy != "cost" or len(workers) <= MOST:
        return workers
    cached = request.cached_tokens
    caching = [worker for worker in workers if cached.get(worker.worker_id)]
    best = nsmallest(MOST // 2, caching, key=lambda worker: (-cached[worker.worker_id], worker.assigned))
    chosen = {worker.worker_id for worker in best}
    first = request.turn % len(workers)
    turned = [worker for worker in (*workers[first:], *workers[:first]) if worker.worker_id not in chosen]
    return [*best, *nsmallest(MOST - len(best), turned, key=lambda worker: worker.assigned)]
