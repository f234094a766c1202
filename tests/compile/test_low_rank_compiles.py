"""The kernels of adapters compile for an H200 at the sizes of an 8B model, decode steps and prompts."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.lora.adapted_gemm import adapted_gemm, gemm_config_of
from kernels.gpu.lora.gated_rows import gated_rows
from kernels.gpu.lora.look_up import look_up
from kernels.gpu.lora.low_rank import LowRankConfig, SlotWeights, expand, shrink
from kernels.gpu.lora.row_tiles import BLOCK_ROWS, RowTiles, num_tiles
from kernels.gpu.lora.tile_shrink import tile_shrink
from tests.compile.hopper import Compiled
from tests.compile.test_compiles_for_hopper import META, OTHER_SETTINGS, check, compiled, ints

__all__ = ["compiled"]  # a fixture
NUM_SLOTS, ON_META = 8, SplitKWorkspace(META)
OTHERS = ((64, 16), (32, 64), (1, 16))  # numbers of rows, and ranks


@pytest.mark.parametrize("rank", [16, *(pytest.param(rank, marks=OTHER_SETTINGS) for rank in (8, 64))])
@pytest.mark.parametrize(
    ("k", "starts"), [(4096, (0, 4096, 5120, 6144)), pytest.param(14336, (0, 4096), marks=OTHER_SETTINGS)]
)
def test_low_rank(rank: int, k: int, starts: tuple[int, ...], compiled: list[Compiled]) -> None:
    weights, config = SlotWeights.empty(NUM_SLOTS, rank, k, starts, torch.bfloat16, META), LowRankConfig()
    for num_rows in (1, 64, 8192):
        count = num_tiles(num_rows, NUM_SLOTS)
        tiles = RowTiles(ints(count, BLOCK_ROWS), ints(count), ints(num_rows))
        x, y = (torch.empty(num_rows, size, dtype=torch.bfloat16, device=META) for size in (k, starts[-1]))
        expand(y, shrink(x, weights, tiles, config), weights, tiles, config)
    check(compiled, "_shrink_kernel", "shrink_few_kernel", "_expand_kernel", "expand_few_kernel")


def test_look_up(compiled: list[Compiled]) -> None:
    weights, config = SlotWeights.empty(NUM_SLOTS, 16, 128256, (0, 4096), torch.bfloat16, META), LowRankConfig()
    for num_rows in (1, 64, 8192):
        count = num_tiles(num_rows, NUM_SLOTS)
        tiles = RowTiles(ints(count, BLOCK_ROWS), ints(count), ints(num_rows))
        y = torch.empty(num_rows, 4096, dtype=torch.bfloat16, device=META)
        expand(y, look_up(ints(num_rows), weights, tiles), weights, tiles, config)
    check(compiled, "_look_up_kernel", "_expand_kernel", spills={"expand_few_kernel": 8})  # h has one split


@pytest.mark.parametrize(
    ("num_rows", "rank"), [(64, 8), *(pytest.param(*each, marks=OTHER_SETTINGS) for each in OTHERS)]
)
@pytest.mark.parametrize(
    ("k", "starts"), [(14336, (0, 4096)), pytest.param(4096, (0, 4096, 5120, 6144), marks=OTHER_SETTINGS)]
)
def test_adapted_gemm(num_rows: int, rank: int, k: int, starts: tuple[int, ...], compiled: list[Compiled]) -> None:
    weights, tiles = SlotWeights.empty(32, rank, k, starts, torch.bfloat16, META), tiles_of(num_rows)
    x, weight = (torch.empty(size, k, dtype=torch.bfloat16, device=META) for size in (num_rows, starts[-1]))
    h, config = tile_shrink(x, weights, tiles, ON_META), gemm_config_of(weights)
    assert config is not None
    adapted_gemm(x, weight, None, h, weights, tiles, ON_META, config)
    check(compiled, "_tile_shrink_kernel", "_adapted_kernel")


@pytest.mark.parametrize("num_rows", [64, *(pytest.param(rows, marks=OTHER_SETTINGS) for rows in (1, 32))])
def test_gate_and_up(num_rows: int, compiled: list[Compiled]) -> None:
    weights = SlotWeights.empty(32, 16, 4096, (0, 14336, 2 * 14336), torch.bfloat16, META)
    x, weight = (torch.empty(size, 4096, dtype=torch.bfloat16, device=META) for size in (num_rows, 2 * 14336))
    tiles = tiles_of(num_rows)
    gated_rows(x, weight, None, tile_shrink(x, weights, tiles, ON_META), weights, tiles)
    check(compiled, "_tile_shrink_kernel", "_gated_rows_kernel")


def tiles_of(num_rows: int) -> RowTiles:
    count = num_tiles(num_rows, 32)
    return RowTiles(ints(count, BLOCK_ROWS), ints(count), ints(num_rows))
