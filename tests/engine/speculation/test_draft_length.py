"""The number of drafts of a step, compared with all possible choices, and the learned acceptance rates."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.step_times import StepCost
from engine.plan import StepSize
from engine.speculation.acceptance import PRIOR, Acceptance, DraftRecord
from engine.speculation.draft_length import GAIN, STEPS_BETWEEN_TRIALS, DraftLengths, expected_to_pay
from engine.speculation.step_costs import StepCosts

PROBABILITIES = st.lists(st.floats(0.0, 1.0), max_size=3)


@dataclass
class Line:
    """A linear cost of steps, without tiles."""

    cost: StepCost

    def seconds(self, num_tokens: int, context: int) -> float:
        return self.cost.seconds(num_tokens, context=context)


def speed(
    acceptance: list[list[float]], lengths: tuple[int, ...], num_rows: int, cost: StepCost, context: int
) -> float:
    """Return the expected tokens per second."""
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
    chosen, best = expected_to_pay(acceptance, num_rows, max_drafts, Line(cost), context)
    assert sum(chosen) <= max_drafts
    found = speed(acceptance, tuple(chosen), num_rows, cost, context)
    assert found == pytest.approx(best)
    for lengths in product(*(range(len(each) + 1) for each in acceptance)):
        if sum(lengths) <= max_drafts:
            most = found * (1 + 1e-9) if any(chosen) else found * GAIN
            assert speed(acceptance, lengths, num_rows, cost, context) <= most


def test_all_drafts_are_tried_before_costs_are_known() -> None:
    assert expected_to_pay([[0.1, 0.1], [0.5]], 2, 8, Line(StepCost()), 0) == ([2, 1], 0.0)


def in_tiles(num_tokens: int) -> float:
    """Cost of kernels that take eight tokens at a time."""
    return 0.002 + 0.01 * -(-num_tokens // 8)


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        ([[0.6] * 4] * 8, [0] * 8),  # a tile more takes as long as the first, and gives 4.8 of 8 tokens
        ([[0.97]] * 8, [1] * 8),
        ([[0.3] * 4] * 5, [1, 1, 1, 0, 0]),  # the first tile has room for three
        ([[0.9] * 20], [7]),
    ],
)
def test_drafts_fill_the_tiles_of_kernels(acceptance: list[list[float]], expected: list[int]) -> None:
    costs, rng = StepCosts(tile=8), random.Random(0)
    for _ in range(2000):
        num_tokens = rng.randrange(1, 33)
        costs.observe(num_tokens, in_tiles(num_tokens) * rng.uniform(0.97, 1.03), 1000)
    assert costs.seconds(7, 1000) == pytest.approx(in_tiles(7), rel=0.1)
    assert costs.seconds(14, 1000) == pytest.approx(in_tiles(14), rel=0.1)
    chosen, _ = expected_to_pay(acceptance, len(acceptance), 64, costs, 1000)
    assert chosen == expected


def test_a_tile_is_expected_to_cost_what_the_first_one_does() -> None:
    costs = StepCosts(tile=8)
    assert expected_to_pay([[0.9] * 8] * 7, 7, 64, costs, 1000)[0] == [1, 0, 0, 0, 0, 0, 0]  # before the first step
    for _ in range(4):
        costs.observe(8, 0.05, 1000)
    assert costs.seconds(1, 1000) == pytest.approx(0.05)
    assert costs.seconds(9, 1000) == costs.seconds(16, 1000) == pytest.approx(0.1)
    assert expected_to_pay([[0.9] * 8] * 8, 8, 64, costs, 1000)[0] == [0] * 8
    assert expected_to_pay([[0.9] * 8] * 3, 3, 64, costs, 1000)[0] == [2, 2, 1]


def test_a_line_stands_for_steps_that_were_not_seen() -> None:
    costs = StepCosts()
    assert costs.seconds(8) == 0.0
    for num_tokens in 1, 1, 1, 8, 1, 8, 1, 8, 8:
        costs.observe(num_tokens, 0.01 + 0.001 * num_tokens, 0)
    assert costs.seconds(20) == pytest.approx(0.03, rel=0.1)


def test_costs_are_learned_and_looked_at_again() -> None:
    """A step of five tokens takes as long as five of one: drafts stop, except for occasional trials."""
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


# -- acceptance -----------------------------------------------------------------------------------------------------


def follow(
    acceptance: Acceptance, record: DraftRecord, drafts: list[int], kinds: list[int], sampled: list[int]
) -> None:
    acceptance.propose(record, drafts, kinds)
    acceptance.learn(record, sampled)


def test_kinds_are_learned_from_what_was_sampled() -> None:
    """Whether a step computed the drafts or not; if not, one sampled token shows the acceptance."""
    acceptance = Acceptance(3)
    for number in range(100):
        follow(acceptance, DraftRecord(), [1, 2, 3], [2, 1, 0], [1, 9])
        follow(acceptance, DraftRecord(), [1, 2, 3], [2, 1, 0], [1] if number % 2 else [4])
    new = DraftRecord()
    assert acceptance.of_kind(new, 2) == pytest.approx(0.75, abs=0.05)
    assert acceptance.of_kind(new, 1) < 0.1
    assert acceptance.of_kind(new, 0) == PRIOR  # never came that far
    assert acceptance.of_any(new) == pytest.approx(0.5, abs=0.05)


def test_a_request_may_differ_from_others() -> None:
    acceptance, odd = Acceptance(1), DraftRecord()
    for _ in range(100):
        follow(acceptance, DraftRecord(), [1], [0], [1])
    for _ in range(10):
        follow(acceptance, odd, [1], [0], [2])
    assert acceptance.of_kind(DraftRecord(), 0) > 0.85
    assert acceptance.of_kind(odd, 0) < 0.4
    for _ in range(30):
        follow(acceptance, odd, [1], [0], [1])
    assert acceptance.of_kind(odd, 0) > 0.85


def test_estimates_come_with_the_drafts() -> None:
    acceptance = Acceptance(2)
    drafts = acceptance.propose(DraftRecord(), [5, 6], [1, 0])
    assert (drafts.token_ids, drafts.acceptance) == ([5, 6], [PRIOR, PRIOR])
