"""Launch configurations of GEMMs, and the table that chooses them by the shapes of x and of the weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic

from kernels.gpu.tuning import Config, Rule, first_fit


class GemmTable(Generic[Config]):
    """A table for x (rows, k) and a weight (n, k); it finds None if another kernel is faster.

    rows: of x, or of its int8 planes. n_per_k: n / k. outputs: rows * n. tiles: of 64 x 512 weights.
    """

    def __init__(self, *rules: Rule[Config]) -> None:
        self.rules = rules
        self.find: Callable[[int, int, int], Config | None] = lru_cache(maxsize=4096)(self._find)  # (rows, n, k)

    def _find(self, rows: int, n: int, k: int) -> Config | None:
        tiles = -(-n // 64) * -(-k // 512)
        return first_fit(self.rules, rows=rows, n=n, k=k, n_per_k=n / k, outputs=rows * n, tiles=tiles)


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """block_n x block_k: the tile of W per iteration of a program's loop."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TileConfig:
    """block_n x block_k: the tile of W per iteration of a program's loop; split_k programs share a tile's K.

    block_m: most rows, or rows of planes, per program; fewer are padded to a power of two, at least 16 (or 8, if that
    is the most, for grouped GEMMs). columns_first: for grouped GEMMs, adjacent programs share pairs, which are then
    read from memory once, instead of columns. by_descriptor: for grouped GEMMs, see `takes_boxes`.
    """

    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    block_m: int = 128
    columns_first: bool = False
    by_descriptor: bool = False


@dataclass(frozen=True, slots=True)
class PreloadedConfig:
    """chunk: columns of W and x per load. num_chunks: per program. depth: chunks of x in flight."""

    chunk: int
    num_chunks: int = 1
    depth: int = 1
