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
