"""Prompts' tiles whose keys are split among programs give the results of whole tiles."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.attention.paged_prefill import TileSplits
from kernels.gpu.attention.prompt_tiles import LARGE_TILE, SMALL_TILE, Tile
from kernels.gpu.prompt_graphs import split_tiles as split_tiles_module
from kernels.gpu.prompt_graphs.merge_splits import PrefillSplits, split_workspace
from kernels.gpu.prompt_graphs.split_tiles import split_tiles
from tests.kernels.attention.test_paged_prefill import check_large_blocks, check_windows_and_sinks
from tests.kernels.helpers import HALF_DTYPE


@pytest.fixture
def _small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_tiles_module, "MIN_SPLIT", 64)


def split(
    tiles: list[Tile], num_kv_heads: int, tile_m: int, head_dim: int, device: torch.device,
) -> tuple[torch.Tensor, TileSplits]:  # fmt: skip
    """Split tiles, and pad the result as graphs do."""
    num_spare = 20
    found, merges = split_tiles(tiles, num_spare)
    assert merges
    merges += [(0, 0, 0, 0)] * (num_spare - len(merges))
    outputs, log_sums = split_workspace(num_spare, num_kv_heads, tile_m, head_dim, device)
    outputs.fill_(float("nan"))
    splits = PrefillSplits(torch.tensor(merges, dtype=torch.int32, device=device), outputs, log_sums)
    return torch.tensor([*found, (0,) * 7], dtype=torch.int32, device=device), splits


@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize("has_boxes", [True, False])
@pytest.mark.parametrize("kv_dtype", [HALF_DTYPE, torch.float8_e4m3fn])
@pytest.mark.parametrize(("block_size", "tile_m"), [(64, SMALL_TILE), (128, LARGE_TILE)])
def test_large_blocks(
    has_boxes: bool, kv_dtype: torch.dtype, block_size: int, tile_m: int, device: torch.device
) -> None:
    check_large_blocks(has_boxes, kv_dtype, block_size, tile_m, device, split)


@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize(("block_size", "tile_n", "has_boxes"), [(16, 16, False), (8, 32, False), (64, 64, True)])
@pytest.mark.parametrize(("window", "has_sinks"), [(1, False), (40, True), (500, True)])
def test_windows_and_sinks(
    window: int, has_sinks: bool, block_size: int, tile_n: int, has_boxes: bool, device: torch.device
) -> None:
    check_windows_and_sinks(window, has_sinks, block_size, tile_n, has_boxes, device, split)


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 64)), max_size=80), st.sampled_from([1, 8, 66, 264]))
def test_splits_cover_the_keys_of_each_tile_once(rows: list[tuple[int, int]], num_spare: int) -> None:
    tiles = [(row, 64 * row, position, count) for row, (position, count) in enumerate(rows)]
    found, merges = split_tiles(tiles, num_spare)
    assert len(found) <= len(tiles) + num_spare
    assert len(merges) <= num_spare
    sizes = [end - first for *_, first, end, _ in found]
    assert not merges or sizes == sorted(sizes, reverse=True)
    by_slot = {slot: (tuple(tile), first, end) for *tile, first, end, slot in found if slot}
    assert set(by_slot) == set(range(1, 1 + len(by_slot)))
    assert len(by_slot) <= 2 * num_spare
    merged = [[by_slot.pop(slot + index) for index in range(count)] for slot, count, _, _ in merges]
    assert not by_slot
    whole = [[(tuple(tile), first, end)] for *tile, first, end, slot in found if not slot]
    for splits, of_tile in zip(merged, merges, strict=True):
        [tile] = {tile for tile, _, _ in splits}
        assert (tile[1], tile[3]) == of_tile[2:]
    assert sorted(splits[0][0] for splits in whole + merged) == tiles
    for splits in whole + merged:
        _, _, position, count = splits[0][0]
        assert (splits[0][1], splits[-1][2]) == (0, position + count)
        assert splits[-1][1] <= position
        assert all(end == start and end % 128 == 0 for (_, _, end), (_, start, _) in pairwise(splits))


def test_few_tiles_after_long_contexts_fill_the_gpu_and_many_stay_whole() -> None:
    few, _ = split_tiles([(0, 9 * index, 15_000 + 9 * index, 9) for index in range(7)], 66)
    assert 49 <= len(few) <= 66
    many, merges = split_tiles([(0, 9 * index, 15_000 + 9 * index, 9) for index in range(80)], 66)
    assert (len(many), merges) == (80, [])
    short, merges = split_tiles([(0, 9 * index, 1000, 9) for index in range(7)], 66)
    assert (len(short), merges) == (7, [])
