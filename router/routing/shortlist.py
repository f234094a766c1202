"""Which workers of many are worth a prediction: a decision must not take longer the larger the cluster is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from typing import TypeVar

from kvstore.types import WorkerId

W = TypeVar("W")
MOST = 32  # workers of a role that are looked at: those with the longest cached prefix, then the least loaded


def shortlist(
    workers: Sequence[W],
    id_of: Callable[[W], WorkerId],
    load_of: Callable[[W], tuple[int, int]],
    cached_tokens: Mapping[WorkerId, int],
    turn: int,
) -> Sequence[W]:
    """All of a few workers, else MOST of them: half by cached prefix, as far as there are such, the rest by load.

    load_of: prompt tokens to compute, and requests. turn: where among equal workers to begin, so that all get some.
    """
    if len(workers) <= MOST:
        return workers
    caching = [worker for worker in workers if cached_tokens.get(id_of(worker))]
    best = nsmallest(MOST // 2, caching, key=lambda worker: (-cached_tokens[id_of(worker)], load_of(worker)))
    chosen = {id(worker) for worker in best}
    first = turn % len(workers)
    turned = [worker for worker in (*workers[first:], *workers[:first]) if id(worker) not in chosen]
    return [*best, *nsmallest(MOST - len(best), turned, key=load_of)]
