"""The end of a GEMM's loop over K, on a GPU: the columns that adapters add to x and to W.

    y[i, n] += sum_{t, r} H[i, (t, r)] B[(t, r), n]        B[(t, r), n] of tile t's adapter, H: `tile_shrink.py`

Tensor cores multiply every tile's B by all rows: H has zeros where a row is not in the tile. So a program streams its
columns of each adapter's B once. Lines of B beyond an adapter's rank are read where H is zero, so they have to be
finite.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_adapters(
    total, h_ptr, b_ptr, ranks_ptr, slots_ptr, tile_of_row, module, rows, columns, inside, num_rows, num_tiles, N,
    MODULES: tl.constexpr, RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Add the transposed H B of a module to total (columns, rows). columns: of B, N in all; `inside`: which exist.

    num_tiles: tiles in use come first; H has a multiple of TILES of them. tile_of_row: -1 without an adapter.
    """
    tiles = tl.arange(0, BLOCK_T)
    slots = tl.load(slots_ptr + tiles, mask=tiles < num_tiles, other=-1)
    most = tl.max(tl.load(ranks_ptr + slots * MODULES + module, mask=slots >= 0, other=0), 0)
    used = tl.sum((slots >= 0).to(tl.int32), 0)
    NUM_BLOCKS: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    block_size = tl.cdiv(num_tiles, TILES) * (TILES * BLOCK_R)
    lines = tl.arange(0, TILES * BLOCK_R)
    h_at = h_ptr + (module * num_rows + rows)[:, None] * (NUM_BLOCKS * block_size) + lines[None, :]
    b_at = b_ptr + (lines % BLOCK_R)[:, None] * N + columns[None, :]
    has_adapter = (tile_of_row >= 0)[:, None]
    slots = tl.maximum(slots, 0)  # the last tiles in use may share an iteration with unused ones
    for block in range(tl.cdiv(most, BLOCK_R)):
        for first in tl.range(0, used, TILES, num_stages=NUM_STAGES):
            start = (tl.gather(slots, first + lines // BLOCK_R, 0) * RANK + block * BLOCK_R).to(tl.int64) * N
            if RANK % BLOCK_R > 0:
                exists = inside[None, :] & (block * BLOCK_R + lines % BLOCK_R < RANK)[:, None]
                b = tl.load(b_at + start[:, None], mask=exists, other=0.0)
            else:
                b = tl.load(b_at + start[:, None], mask=inside[None, :], other=0.0)
            h = tl.load(h_at + block * block_size + first * BLOCK_R, mask=has_adapter, other=0.0)
            total = tl.dot(tl.trans(b), tl.trans(h), total, input_precision="ieee")
    return total
