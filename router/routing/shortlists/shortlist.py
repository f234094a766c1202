"""Workers that are worth a prediction, of many. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import Protocol, TypeVar

from kvstore.types import WorkerId
from router.routing.views import RequestView

MOST = 32  # workers of a role that are looked at: those with the longest cached prefix, then the least loaded


class Assignable(Protocol):
    """What is known of a worker without a prediction."""

    @property
    def worker_id(self) -> WorkerId: ...

    @property
    def assigned(self) -> tuple[int, int]:
        """Prompt tokens to compute and requests, by the router's own count."""


W = TypeVar("W", bound=Assignable)


def shortlist(policy: str, workers: Sequence[W], request: RequestView) -> Sequence[W]:
    """The workers of many that are worth a prediction: a decision must not take longer the larger the cluster is.

    The cost policy looks at MOST of many: half by cached prefix, as far as there are such, the rest by load. The turn
    of the request says with which of equal workers to begin. Other policies choose among all.
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
