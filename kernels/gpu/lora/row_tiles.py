"""Which rows of a step name which adapter, as tiles of rows of one adapter: what both kernels of low rank read.

Shapes depend on the number of rows and of slots alone, so a CUDA graph that was captured with such tensors serves any
rows: the host fills them anew before each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_ROWS = 16  # the least that tensor cores take
NOTHING = -1


class RowTiles(NamedTuple):
    """rows: int32 (num_tiles, BLOCK_ROWS), of x; -1: none. slots: int32 (num_tiles,), the adapter's; -1: no tile."""

    rows: Tensor
    slots: Tensor


def num_tiles(num_rows: int, num_slots: int) -> int:
    """Tiles that are enough for any rows: each slot's last one may be partly empty."""
    return min(-(-num_rows // BLOCK_ROWS) + num_slots, num_rows)


def tile_rows(slot_of_row: Sequence[int], num_slots: int) -> RowTiles:
    """Lay out rows, on the CPU. slot_of_row: NOTHING for rows without an adapter."""
    by_slot: dict[int, list[int]] = {}
    for row, slot in enumerate(slot_of_row):
        if slot != NOTHING:
            by_slot.setdefault(slot, []).append(row)
    count = num_tiles(len(slot_of_row), num_slots)
    rows = torch.full((count, BLOCK_ROWS), NOTHING, dtype=torch.int32)
    slots = torch.full((count,), NOTHING, dtype=torch.int32)
    tile = 0
    for slot, own in by_slot.items():
        for first in range(0, len(own), BLOCK_ROWS):
            part = own[first : first + BLOCK_ROWS]
            rows[tile, : len(part)] = torch.tensor(part, dtype=torch.int32)
            slots[tile] = slot
            tile += 1
    return RowTiles(rows, slots)
