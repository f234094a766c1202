"""Copies of single blocks, merged where both sides lie next to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def merged_runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Runs (source, target, count) in which both sides ascend by one: one copy each."""
    index = 0
    while index < len(pairs):
        source, target = pairs[index]
        count = 1
        while index + count < len(pairs) and pairs[index + count] == (source + count, target + count):
            count += 1
        yield source, target, count
        index += count


def runs_of(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs (index of the first, its row, count) in which rows ascend by one. A pool in little use has few."""
    return merged_runs(list(enumerate(rows)))
