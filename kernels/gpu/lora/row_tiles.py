"""Lists of a step's rows by adapter, as tiles of rows of one adapter: what both low-rank kernels read.

Shapes depend only on the numbers of rows and slots, so a CUDA graph captured with such tensors works for any rows:
the host refills them before each replay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK_ROWS = 16  # the least that tensor cores take
NOTHING = -1


class RowTiles(NamedTuple):
    """rows: int32 (num_tiles, BLOCK_ROWS), of x; -1: none. slots: int32 (num_tiles,), the adapter's; -1: no tile.

    tile_of_row: int32 (num_rows,), -1 without an adapter.
    """

    rows: Tensor
    slots: Tensor
    tile_of_row: Tensor


def num_tiles(num_rows: int, num_slots: int) -> int:
    """Return enough tiles for any rows: each slot's last tile may be partly empty."""
    return min(-(-num_rows // BLOCK_ROWS) + num_slots, num_rows)


def tile_rows(slot_of_row: Any, num_slots: int) -> RowTiles:
    """List rows in tiles, on the CPU. slot_of_row: a list or int32 array, NOTHING for rows without an adapter."""
    slot_of_row = np.asarray(slot_of_row, np.int32)
    count = num_tiles(len(slot_of_row), num_slots)
    rows = np.full((count, BLOCK_ROWS), NOTHING, np.int32)
    slots = np.full((count,), NOTHING, np.int32)
    order = np.argsort(slot_of_row, kind="stable")
    order = order[slot_of_row[order] != NOTHING]
    own = slot_of_row[order]
    place = np.arange(len(own)) - np.searchsorted(own, own)  # index among the rows of its slot
    tile = np.cumsum(place % BLOCK_ROWS == 0) - 1
    rows[tile, place % BLOCK_ROWS] = order
    slots[tile] = own
    tile_of_row = np.full((len(slot_of_row),), NOTHING, np.int32)
    tile_of_row[order] = tile
    return RowTiles(*(torch.from_numpy(part) for part in (rows, slots, tile_of_row)))
