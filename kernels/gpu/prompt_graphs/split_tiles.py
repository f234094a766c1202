"""KV splits of prompts' tiles, listed by the host.

Pure. A few queries after a long context have few tiles, which would use few multiprocessors, so their keys are
divided between programs (`merge_splits.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.gpu.attention.prompt_tiles import Tile
from kernels.gpu.launch import num_multiprocessors

WIDTH = 7  # numbers per tile that may be split
MIN_SPLIT = 1024  # keys: merging costs more than smaller splits save
UNIT = 128  # keys, a multiple of what a program's loop loads at a time
PER_MULTIPROCESSOR = 2  # programs that run at once


def num_spare_tiles(num_kv_heads: int, device: torch.device) -> int:
    """Return the number of tiles that fill the GPU, which also limits the tiles that `split_tiles` adds."""
    return max(PER_MULTIPROCESSOR * num_multiprocessors(device) // num_kv_heads, 1)


def split_tiles(tiles: Sequence[Tile], num_spare: int) -> tuple[list[tuple[int, ...]], list[Tile]]:
    """Split tiles of `prefill_tiles` until they fill the GPU.

    Returns a tile for each split, longest first: the tile's four numbers, first key, end key, and slot; slot 0: the
    tile is whole. Also returns the merges: (slot of the first split, number of splits, index of the tile's first
    token, tokens), at most `num_spare`. Slots are numbered from 1 to at most twice `num_spare`.
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
