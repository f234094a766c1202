"""Merging copies: every pair once, in order, and no two runs that could be merged."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.types import merged_runs, runs_of


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_runs_cover_all_pairs_in_order(pairs: list[tuple[int, int]]) -> None:
    found = list(merged_runs(pairs))
    assert [(a + i, b + i) for a, b, count in found for i in range(count)] == pairs
    for (a, b, count), (c, d, _) in pairwise(found):
        assert (c, d) != (a + count, b + count)


def test_runs_of_one_side() -> None:
    assert list(runs_of([])) == []
    assert list(runs_of([7, 8, 9, 3, 2, 4, 5])) == [(0, 7, 3), (3, 3, 1), (4, 2, 1), (5, 4, 2)]
