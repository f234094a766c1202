"""The kernels of adapters compile for an H200 at the sizes of an 8B model, decode steps and prompts."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.lora.low_rank import add_low_rank
from kernels.gpu.lora.row_tiles import BLOCK_ROWS, RowTiles, num_tiles
from tests.compile.hopper import Compiled
from tests.compile.test_compiles_for_hopper import META, check, compiled, ints

__all__ = ["compiled"]  # a fixture
NUM_SLOTS = 8


@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize(("k", "n"), [(4096, 6144), (14336, 4096)])
def test_low_rank(rank: int, k: int, n: int, compiled: list[Compiled]) -> None:
    for num_rows in (1, 64, 8192):
        count = num_tiles(num_rows, NUM_SLOTS)
        tiles = RowTiles(ints(count, BLOCK_ROWS), ints(count))
        x, y = (torch.empty(num_rows, size, dtype=torch.bfloat16, device=META) for size in (k, n))
        a, b = (torch.empty(NUM_SLOTS, *shape, dtype=torch.bfloat16, device=META) for shape in ((rank, k), (n, rank)))
        add_low_rank(y, x, a, b, tiles)
    check(compiled, "_shrink_kernel", "_expand_kernel")
