"""The work of programs of prompts' attention, listed by the host: tiles of queries, and KV splits.

Pure. A launch takes a list of tiles, longest first, so that no long one starts last. A few queries after a long
context have few tiles, which would use few multiprocessors: their keys are shared among programs
(`prefill_splits.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.gpu.launching.launch import num_multiprocessors

LARGE_TILE, SMALL_TILE = 128, 64  # rows of (token, head) a program holds
WAVES = 3  # large tiles are for launches with so many programs a multiprocessor
Tile = tuple[int, int, int, int]
WIDTH = 7  # numbers of a tile that may be split
MIN_SPLIT = 1024  # keys: combining costs more than smaller splits save
UNIT = 128  # keys, a multiple of what a program's loop takes at a time
PER_MULTIPROCESSOR = 2  # programs that run at once


def choose_tile(num_tokens: int, num_heads: int, device: torch.device) -> int:
    """The tile size for a launch of so many tokens: large ones read K and V less often, small ones fill the GPU."""
    is_large = num_tokens * num_heads >= WAVES * num_multiprocessors(device) * LARGE_TILE
    return LARGE_TILE if is_large else SMALL_TILE


def prefill_tiles(
    query_starts: Sequence[int], seq_lens: Sequence[int], group: int, tile_m: int = LARGE_TILE
) -> list[Tile]:
    """The programs' work, longest first: (row, index of the tile's first token, its position, tokens it has).

    query_starts: each row's first token, and the number of tokens at the end. seq_lens: keys that each row's last
    query sees. A row without queries has no tile. Tiles of zero tokens at position 0 do nothing: padding.
    """
    tokens_per_tile = max(tile_m // group, 1)
    tiles = []
    for row, seq_len in enumerate(seq_lens):
        start, stop = query_starts[row], query_starts[row + 1]
        for first in range(start, stop, tokens_per_tile):
            count = min(tokens_per_tile, stop - first)
            tiles.append((row, first, seq_len - (stop - first), count))
    return sorted(tiles, key=lambda tile: -tile[2])


def num_spare_tiles(num_kv_heads: int, device: torch.device) -> int:
    """Tiles that fill the GPU, and how many more than whole ones `split_tiles` gives at most."""
    return max(PER_MULTIPROCESSOR * num_multiprocessors(device) // num_kv_heads, 1)


def split_tiles(tiles: Sequence[Tile], num_spare: int) -> tuple[list[tuple[int, ...]], list[Tile]]:
    """Split tiles of `prefill_tiles` until they fill the GPU.

    Returns a tile for each of its splits, longest first: the tile's four numbers, first key, end key, and slot; slot
    0: the tile is whole. And what has to be merged: (slot of the first split, number of splits, index of the tile's
    first token, tokens), at most `num_spare`. Slots are numbered from 1 to at most twice `num_spare`.
    """
    keys = [position + count for _, _, position, count in tiles]
    if max(keys, default=0) <= MIN_SPLIT:
        return [(*tile, 0, num_keys, 0) for tile, num_keys in zip(tiles, keys, strict=True)], []
    most = max(-(-sum(keys) // num_spare), MIN_SPLIT)
    while len(tiles) < num_spare < sum(-(-num_keys // most) for num_keys in keys):
        most += most // 4  # a second wave of programs would be mostly empty
    found: list[tuple[int, ...]] = []
    merges: list[Tile] = []
    slot = 1
    for tile, num_keys in zip(tiles, keys, strict=True):
        size = -(-num_keys // -(-num_keys // most))
        size = -(-size // UNIT) * UNIT
        starts = range(0, tile[2] + 1, size)  # all queries of the tile see a split's first key
        if len(starts) == 1:
            found.append((*tile, 0, num_keys, 0))
            continue
        merges.append((slot, len(starts), tile[1], tile[3]))
        ends = [*starts[1:], num_keys]
        found += [(*tile, *split, slot + i) for i, split in enumerate(zip(starts, ends, strict=True))]
        slot += len(starts)
    return sorted(found, key=lambda split: split[4] - split[5]), merges
