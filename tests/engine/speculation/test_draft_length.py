"""How many drafts a step computes, against all choices there are."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.step_times import StepCost
from engine.plan import StepSize
from engine.speculation.draft_length import STEPS_BETWEEN_TRIALS, DraftLengths, expected_to_pay

PROBABILITIES = st.lists(st.floats(0.0, 1.0), max_size=3)


def speed(
    acceptance: list[list[float]], lengths: tuple[int, ...], num_rows: int, cost: StepCost, context: int
) -> float:
    """Tokens a second that are expected."""
    tokens = sum(prod(row[: i + 1]) for row, length in zip(acceptance, lengths, strict=True) for i in range(length))
    return (num_rows + tokens) / cost.seconds(num_rows + sum(lengths), context=context)


@given(
    acceptance=st.lists(PROBABILITIES, max_size=3),
    num_others=st.integers(0, 5),
    max_drafts=st.integers(0, 9),
    row=st.floats(1e-4, 1e-2),
    context=st.integers(0, 10_000),
)
def test_no_other_choice_is_faster(
    acceptance: list[list[float]], num_others: int, max_drafts: int, row: float, context: int
) -> None:
    cost, num_rows = StepCost(base=4e-3, row=row, context=1e-7), len(acceptance) + num_others
    if not num_rows:
        return
    chosen = expected_to_pay(acceptance, num_rows, max_drafts, cost, context)
    assert sum(chosen) <= max_drafts
    found = speed(acceptance, tuple(chosen), num_rows, cost, context)
    for lengths in product(*(range(len(each) + 1) for each in acceptance)):
        if sum(lengths) <= max_drafts:
            assert speed(acceptance, lengths, num_rows, cost, context) <= found * (1 + 1e-9)


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(1, 4), (16, 2), (64, 1), (1000, 0)],
)
def test_fewer_drafts_in_larger_batches(num_rows: int, expected: int) -> None:
    """Up to a full batch, where time grows with every token."""
    cost = StepCost(base=16e-3, row=5e-4)
    chosen = expected_to_pay([[0.7] * 4] * num_rows, num_rows, 10_000, cost, 0)
    assert set(chosen) == {expected}


def test_all_drafts_are_tried_before_costs_are_known() -> None:
    assert expected_to_pay([[0.1, 0.1], [0.5]], 2, 8, StepCost(), 0) == [2, 1]


def test_costs_are_learned_and_looked_at_again() -> None:
    """A step of five tokens takes as long as five of one: drafts stop, but for a trial now and then."""
    lengths = DraftLengths()
    chosen = []
    for _ in range(2 * STEPS_BETWEEN_TRIALS + 50):
        [count] = lengths.choose([[0.5] * 4], 1, 8, 100)
        lengths.exclude(5.0)  # what drafting takes is not a part of the step
        lengths.observe(StepSize(1 + count, 0, 100, 0), 5.0 + 0.01 * (1 + count))
        chosen.append(count)
    assert 1 <= sum(count > 0 for count in chosen[:50]) <= 12
    assert 1 <= sum(count > 0 for count in chosen[50:]) <= 4
    lengths.observe(StepSize(5, 64, 100, 0), 9.0)  # with a prompt: tells nothing
    assert lengths.choose([[0.5] * 4], 1, 8, 100) == [0]


def test_without_adapting_all_drafts_are_chosen() -> None:
    lengths = DraftLengths(is_adaptive=False)
    for _ in range(20):
        lengths.observe(StepSize(3, 0, 100, 0), 0.03)
    assert lengths.choose([[0.0] * 3, [0.1]], 2, 1, 100) == [3, 1]
