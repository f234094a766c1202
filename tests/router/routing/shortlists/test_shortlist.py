"""The shortlist: the few of many workers for which costs are predicted."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvstore.types import WorkerId
from router.routing.shortlists.shortlist import MOST, shortlist
from router.routing.views import RequestView


@dataclass(frozen=True)
class Worker:
    worker_id: WorkerId
    assigned: tuple[int, int]


def workers(count: int, seed: int = 0) -> list[Worker]:
    rng = random.Random(seed)
    return [Worker(WorkerId(f"w{n}"), (rng.randrange(1000), rng.randrange(9))) for n in range(count)]


def chosen(made: list[Worker], cached: dict[str, int], turn: int = 0) -> list[Worker]:
    known = {WorkerId(name): count for name, count in cached.items()}
    return list(shortlist("cost", made, RequestView(1000, known, turn=turn)))


def test_a_few_workers_are_all_looked_at() -> None:
    made = workers(MOST)
    assert chosen(made, {"w3": 64}, turn=5) == made


def test_those_with_the_prefix_and_the_least_loaded() -> None:
    made = workers(500)
    cached = {f"w{n}": 64 * (n % 7) for n in range(100)}  # of some nothing, though they are known
    found = chosen(made, cached)
    assert len(found) == len(set(found)) == MOST
    by_prefix = sorted((w for w in made if cached.get(w.worker_id)), key=lambda w: (-cached[w.worker_id], w.assigned))
    assert found[: MOST // 2] == by_prefix[: MOST // 2]
    rest = sorted(w.assigned for w in made if w not in by_prefix[: MOST // 2])
    assert [w.assigned for w in found[MOST // 2 :]] == rest[: MOST - MOST // 2]


def test_equal_workers_take_turns() -> None:
    made = [Worker(WorkerId(f"w{n}"), (0, 0)) for n in range(100)]
    seen = set()
    for turn in range(0, 100, MOST):
        seen |= set(chosen(made, {}, turn))
    assert seen == set(made)


def test_other_policies_choose_among_all() -> None:
    made = workers(100)
    assert shortlist("session-sticky", made, RequestView(1000, {})) == made
