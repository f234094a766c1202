"""Placements of experts: each expert has a slot, none is twice on a rank, and imbalance does not increase."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from engine.expert_balancing.placement import (
    balanced_placement,
    better_placement,
    first_placement,
    imbalance,
    plain_placement,
    rank_loads,
    slots_of_ranks,
    with_fewest_moves,
)
from engine.expert_parallel.slots import ExpertSlots
from tests.engine.driving import engine_config


def assert_whole(slots: tuple[int, ...], num_experts: int, num_ranks: int) -> None:
    """Check that ranks have equally many slots, every expert has one, and no rank has an expert twice."""
    assert len(slots) % num_ranks == 0
    assert set(slots) == set(range(num_experts))
    assert all(len(set(held)) == len(held) for held in slots_of_ranks(slots, num_ranks))


@given(data=st.data(), num_ranks=st.integers(1, 8), per_rank=st.integers(1, 8))
@settings(max_examples=200)
def test_a_placement_is_whole(data: st.DataObject, num_ranks: int, per_rank: int) -> None:
    num_experts = data.draw(st.integers(per_rank, per_rank * num_ranks))
    loads = data.draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    num_redundant = num_ranks * per_rank - num_experts
    slots = balanced_placement(loads, num_ranks, num_redundant)
    assert len(slots) == num_ranks * per_rank
    assert_whole(slots, num_experts, num_ranks)
    assert sum(rank_loads(slots, loads, num_ranks)) == pytest.approx(sum(loads))
    if not num_redundant:
        plain = imbalance(plain_placement(num_experts), loads, num_ranks)
        assert imbalance(slots, loads, num_ranks) <= plain + 1e-9


@given(data=st.data(), num_ranks=st.integers(1, 5), per_rank=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_a_change_moves_no_more_than_it_must(data: st.DataObject, num_ranks: int, per_rank: int) -> None:
    """Ranks keep their sets of experts in any order; a placement that only permutes ranks moves nothing."""
    num_experts = data.draw(st.integers(per_rank, per_rank * num_ranks))
    loads = st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)
    before, after = (
        balanced_placement(data.draw(loads), num_ranks, num_ranks * per_rank - num_experts) for _ in range(2)
    )
    moved = with_fewest_moves(after, before, num_ranks)
    sets = [sorted(map(sorted, slots_of_ranks(slots, num_ranks))) for slots in (moved, after)]
    assert sets[0] == sets[1]
    for old, new in zip(slots_of_ranks(before, num_ranks), slots_of_ranks(moved, num_ranks), strict=True):
        assert all(old[i] == expert for i, expert in enumerate(new) if expert in old)
    order = data.draw(st.permutations(slots_of_ranks(before, num_ranks)))
    assert with_fewest_moves(tuple(expert for held in order for expert in held), before, num_ranks) == before


def test_without_loads_experts_are_in_order() -> None:
    assert first_placement(6, 2) == plain_placement(6)
    assert first_placement(6, 2, 2) == (0, 1, 2, 3, 0, 1, 4, 5)


def test_a_placement_changes_for_a_gain_alone() -> None:
    before, skewed = (0, 1, 2, 3), [40, 30, 20, 10]
    assert better_placement(before, skewed, 2, 1.41) is None
    better = better_placement(before, skewed, 2, 1.4)
    assert better is not None
    assert rank_loads(better, skewed, 2) == [50, 50]
    assert better_placement(better, skewed, 2, 1.0) is None
    assert better_placement(before, [0, 0, 0, 0], 2, 1.0) is None


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("num_redundant", [0, 8, 16])
def test_skewed_loads_become_even(num_ranks: int, num_redundant: int) -> None:
    loads = [10_000 / (expert + 1) for expert in range(64)]
    found = imbalance(balanced_placement(loads, num_ranks, num_redundant), loads, num_ranks)
    per_rank = 64 // num_ranks
    least = (loads[0] + sum(loads[65 - per_rank :])) * num_ranks / sum(loads)  # the hottest next to the coldest
    assert found < (1.05 if num_redundant else max(1.05, 1.03 * least))
    assert found < imbalance(plain_placement(64), loads, num_ranks) / 1.5


def test_small_cases() -> None:
    assert balanced_placement([4, 3, 2, 1], 2) == (0, 3, 1, 2)
    assert balanced_placement([9, 1, 1, 1], 2, 2) == (0, 1, 2, 0, 1, 3)
    assert rank_loads((0, 1, 0, 2), [8, 1, 3], 2) == [5, 7]
    assert imbalance((0, 1, 0, 2), [8, 1, 3], 2) == pytest.approx(7 / 6)
    assert imbalance((0, 1), [0, 0], 2) == 1.0


def test_room_is_made_where_only_ranks_with_the_expert_have_slots() -> None:
    slots = balanced_placement([12, 12, 1, 0], 3, 2 + 3)
    assert_whole(slots, 4, 3)
    assert max(slots.count(expert) for expert in range(4)) == 3


@pytest.mark.parametrize(("num_ranks", "num_redundant"), [(2, 1), (3, 0), (2, 6), (2, -2)])
def test_unequal_ranks_are_refused(num_ranks: int, num_redundant: int) -> None:
    with pytest.raises(ConfigError, match="another number"):
        balanced_placement([1.0] * 4, num_ranks, num_redundant)


def test_replicas_take_turns() -> None:
    """Row t's choice of expert 0, in slots 0, 3 and 4, goes to them in turn; others have one slot each."""
    slots = ExpertSlots((0, 2, 1, 0, 0), torch.device("cpu"))
    chosen = torch.tensor([[0, 1], [0, 2], [2, 0], [1, 0]])
    assert slots.choose(chosen).tolist() == [[0, 2], [3, 1], [1, 4], [2, 0]]
    assert slots_of_ranks((0, 2, 1, 0), 2) == [(0, 2), (1, 0)]


def test_an_interval_of_less_than_no_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose 1 or more, or 0 for never"):
        engine_config(expert_rebalance_interval=-1, expert_parallel=True, tp=2)
