"""Copies between blocks: of whole ones, merged where both sides lie next to each other, and of parts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """Bytes from one block to another, for i below `height`:

    target[i * target_pitch + target_offset :][:width] = source[i * source_pitch + source_offset :][:width]

    No range of `width` goes beyond the end of a pitch, and blocks are whole pitches long.
    """

    height: int
    width: int
    source_offset: int
    source_pitch: int
    target_offset: int
    target_pitch: int
