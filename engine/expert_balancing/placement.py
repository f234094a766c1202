"""Chooses which experts each rank of an expert-parallel model holds, so that ranks have equal work.

A layer's placement names the expert in each **slot**; ranks have equally many slots, in order. If there are more
slots than experts, the hottest experts have several, their replicas, which take turns
(`engine/expert_parallel/slots.py`).

    replicas   one by one for the expert with the most tokens per replica, at most one on each rank
    packing    the hottest replica first, to the rank with the least load among those with a free slot

Pure functions from tokens of experts to a placement, without torch or a model. DeepSeek's EPLB does the same between
the GPUs of a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from common.errors import ConfigError

Slots = tuple[int, ...]


def plain_placement(num_experts: int) -> Slots:
    """Return the placement of every expert once, in order."""
    return tuple(range(num_experts))


def first_placement(num_experts: int, num_ranks: int, num_redundant: int = 0) -> Slots:
    """Return a placement before loads are known, the plain one without redundant slots. Raises ConfigError."""
    return balanced_placement([0.0] * num_experts, num_ranks, num_redundant)


def balanced_placement(loads: Sequence[float], num_ranks: int, num_redundant: int = 0) -> Slots:
    """Return a placement for loads[expert], the tokens that chose it. num_redundant: slots beyond one per expert.

    Without redundant slots it is never worse for these loads than the plain one. Raises ConfigError.
    """
    num_slots = len(loads) + num_redundant
    if num_slots % num_ranks or not 0 <= num_redundant <= len(loads) * (num_ranks - 1):
        raise ConfigError(
            f"{num_ranks} ranks cannot have equally many of {len(loads)} experts and {num_redundant} replicas, none "
            "twice: choose another number of redundant experts"
        )
    counts = _count_replicas(loads, num_ranks, num_redundant)
    weights = [load / count for load, count in zip(loads, counts, strict=True)]
    slots = _pack(weights, counts, num_ranks)
    plain = plain_placement(len(loads))
    if not num_redundant and imbalance(plain, loads, num_ranks) < imbalance(slots, loads, num_ranks):
        return plain
    return slots


def better_placement(before: Slots, loads: Sequence[float], num_ranks: int, min_gain: float) -> Slots | None:
    """Return a placement whose busiest rank has less load by at least a factor of `min_gain`, or None.

    As many slots as possible keep their expert.
    """
    found = balanced_placement(loads, num_ranks, len(before) - len(loads))
    most_before, most = (max(rank_loads(slots, loads, num_ranks)) for slots in (before, found))
    if not most or most_before < min_gain * most:
        return None
    found = with_fewest_moves(found, before, num_ranks)
    return None if found == before else found


def with_fewest_moves(slots: Slots, before: Slots, num_ranks: int) -> Slots:
    """Reorder ranks and slots of a placement so that many slots keep the expert that they have in `before`."""
    old, new = slots_of_ranks(before, num_ranks), [set(held) for held in slots_of_ranks(slots, num_ranks)]
    pairs = [
        (-len(held.intersection(old[rank])), rank, one) for rank in range(num_ranks) for one, held in enumerate(new)
    ]
    given: dict[int, set[int]] = {}
    taken: set[int] = set()
    for _, rank, one in sorted(pairs):
        if rank not in given and one not in taken:
            given[rank] = new[one]
            taken.add(one)
    found: list[int] = []
    for rank, held in enumerate(old):
        coming = iter(sorted(given[rank].difference(held)))
        found += [expert if expert in given[rank] else next(coming) for expert in held]
    return tuple(found)


def slots_of_ranks(slots: Slots, num_ranks: int) -> list[Slots]:
    """Return the experts of each rank."""
    count = len(slots) // num_ranks
    return [slots[rank * count : (rank + 1) * count] for rank in range(num_ranks)]


def rank_loads(slots: Slots, loads: Sequence[float], num_ranks: int) -> list[float]:
    """Return the tokens of each rank; replicas share equally."""
    counts = Counter(slots)
    return [sum(loads[expert] / counts[expert] for expert in held) for held in slots_of_ranks(slots, num_ranks)]


def imbalance(slots: Slots, loads: Sequence[float], num_ranks: int) -> float:
    """Return the busiest rank's tokens over the mean; 1 is best, and the value without any tokens."""
    of_ranks = rank_loads(slots, loads, num_ranks)
    return max(of_ranks) * num_ranks / sum(of_ranks) if any(of_ranks) else 1.0


def _count_replicas(loads: Sequence[float], num_ranks: int, num_redundant: int) -> list[int]:
    counts = [1] * len(loads)
    for _ in range(num_redundant):
        open_experts = [expert for expert, count in enumerate(counts) if count < num_ranks]
        hottest = max(open_experts, key=lambda expert: (loads[expert] / counts[expert], -expert))
        counts[hottest] += 1
    return counts


def _pack(weights: Sequence[float], counts: Sequence[int], num_ranks: int) -> Slots:
    """Place counts[expert] replicas, of weights[expert] each."""
    num_slots = sum(counts) // num_ranks
    held: list[set[int]] = [set() for _ in range(num_ranks)]

    def load(rank: int) -> float:
        return sum(weights[expert] for expert in held[rank])

    for expert in sorted(range(len(weights)), key=lambda expert: (-weights[expert], expert)):
        for _ in range(counts[expert]):
            free = [rank for rank in range(num_ranks) if len(held[rank]) < num_slots]
            possible = [rank for rank in free if expert not in held[rank]]
            if possible:
                held[min(possible, key=load)].add(expert)
            else:
                _make_room(held, expert, min(free, key=load), weights)
    return tuple(expert for experts in held for expert in sorted(experts))


def _make_room(held: list[set[int]], expert: int, free: int, weights: Sequence[float]) -> None:
    """Place an expert that all ranks with free slots have: it takes the place of one that moves to rank `free`.

    There is always one to move: a full rank has more experts than `free`, and lacks this one.
    """
    full = next(rank for rank, experts in enumerate(held) if expert not in experts)
    moved = min(held[full] - held[free], key=lambda other: (abs(weights[other] - weights[expert]), other))
    held[full].remove(moved)
    held[full].add(expert)
    held[free].add(moved)
