"""Names of the things that travel: block ids and their runs, block keys, host slots, leases, workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NewType

BlockId = NewType("BlockId", int)  # index into one worker's pool
BlockKey = NewType("BlockKey", bytes)  # 32 bytes; equal key means equal KV
HostSlot = NewType("HostSlot", int)  # index into a host-memory tier
LeaseId = NewType("LeaseId", str)
WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)  # 64 random bits, drawn when a pool is made


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
