"""A filter of the keys that a region may contain, in memory that its workers read.

A new request's prefix is rarely in the host tier, and asking the agent costs the step loop 0.3 ms.

Each cell counts the keys that hash to it. Only the agent writes; a worker that reads an old count asks in vain, or
computes a prefix again. A cell that reaches MOST stays there.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from kvstore.pool.block_hash import GROUP_MARK
from kvstore.types import BlockKey

CELLS_PER_SLOT = 16  # a full region answers "maybe" for 6% of absent keys
MOST = 255


def num_cells(num_slots: int) -> int:
    """Return the number of cells, one byte each, after a region's slots: a power of two."""
    return 1 << (CELLS_PER_SLOT * num_slots - 1).bit_length()


class KeyFilter:
    """The cells at the end of a region's memory."""

    def __init__(self, region: mmap.mmap, num_slots: int, block_bytes: int) -> None:
        self._cells = memoryview(region)[num_slots * block_bytes :]
        self._mask = num_cells(num_slots) - 1

    def may_have(self, key: BlockKey) -> bool:
        """Whether the key may be findable; false is certain. Only keys of the first KV group are counted."""
        return key.startswith(GROUP_MARK) or self._cells[self._cell_of(key)] > 0

    def count(self, stored: Iterable[BlockKey], removed: Iterable[BlockKey]) -> None:
        """Count keys that have become findable, and uncount those that no longer are."""
        cells = self._cells
        for keys, change in ((stored, 1), (removed, -1)):
            for key in keys:
                cell = self._cell_of(key)
                if cells[cell] < MOST:
                    cells[cell] += change

    def close(self) -> None:
        """Release the memory."""
        self._cells.release()

    def _cell_of(self, key: BlockKey) -> int:
        return int.from_bytes(key[:8], "little") & self._mask
