"""Lists the tiles of queries that programs of prefill attention compute.

Pure. A launch takes a list of tiles, longest first, so that no long one starts last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.gpu.launch import num_multiprocessors

LARGE_TILE, SMALL_TILE = 128, 64  # rows of (token, head) a program holds
WAVES = 3  # large tiles are for launches with so many programs a multiprocessor
Tile = tuple[int, int, int, int]


def choose_tile(num_tokens: int, num_heads: int, device: torch.device) -> int:
    """Choose the tile size for a number of tokens: large tiles read K and V less often, small ones fill the GPU."""
    is_large = num_tokens * num_heads >= WAVES * num_multiprocessors(device) * LARGE_TILE
    return LARGE_TILE if is_large else SMALL_TILE


def prefill_tiles(
    query_starts: Sequence[int], seq_lens: Sequence[int], group: int, tile_m: int = LARGE_TILE
) -> list[Tile]:
    """Return the tiles, longest first: (row, index of the first token, position of the first token, num tokens).

    query_starts: the first token of each row, last the number of tokens. seq_lens: keys that each row's last query
    sees. A row without queries has no tile. Tiles of zero tokens at position 0 are padding.
    """
    tokens_per_tile = max(tile_m // group, 1)
    tiles = []
    for row, seq_len in enumerate(seq_lens):
        start, stop = query_starts[row], query_starts[row + 1]
        for first in range(start, stop, tokens_per_tile):
            count = min(tokens_per_tile, stop - first)
            tiles.append((row, first, seq_len - (stop - first), count))
    return sorted(tiles, key=lambda tile: -tile[2])
