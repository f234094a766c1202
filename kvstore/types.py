"""Types of identifiers (blocks, block keys, host slots, leases, workers, epochs), and runs of block ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NewType

BlockId = NewType("BlockId", int)  # index into one worker's pool
BlockKey = NewType("BlockKey", bytes)  # 32 bytes; equal keys mean equal KV
HostSlot = NewType("HostSlot", int)  # index into a host-memory tier
LeaseId = NewType("LeaseId", str)
WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)  # 64 random bits, drawn when a pool is created


def merged_runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield runs (source, target, count) in which both sides ascend by one, so that one copy moves each run."""
    index = 0
    while index < len(pairs):
        source, target = pairs[index]
        count = 1
        while index + count < len(pairs) and pairs[index + count] == (source + count, target + count):
            count += 1
        yield source, target, count
        index += count


def runs_of(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs (index of the first row, the row, count) of ascending rows. A pool in little use has few."""
    return merged_runs(list(enumerate(rows)))
