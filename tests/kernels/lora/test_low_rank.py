"""Rows of several adapters and of none in one launch each of shrink and expand."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kernels.gpu.lora.low_rank import LowRankConfig, add_low_rank, low_rank_reference
from kernels.gpu.lora.row_tiles import BLOCK_ROWS, NOTHING, RowTiles, num_tiles, tile_rows
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, relative_error

NUM_SLOTS = 4
SMALL = LowRankConfig(block_k=32, block_n=64, num_warps=1, num_stages=1)


def slots_of(num_rows: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(-1, NUM_SLOTS) for _ in range(num_rows)]


def on(device: torch.device, tiles: RowTiles) -> RowTiles:
    return RowTiles(tiles.rows.to(device), tiles.slots.to(device))


def weights(rank: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    a = torch.randn(NUM_SLOTS, rank, k, device=device) * k**-0.5
    b = torch.randn(NUM_SLOTS, n, rank, device=device)
    b[1, :, rank // 2 :] = 0  # an adapter of a smaller rank: what lies behind it is not read into the sum
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("num_rows", [1, 2, 15, 70])
@pytest.mark.parametrize(("rank", "k", "n"), [(8, 64, 48), (16, 96, 130), (48, 72, 64), (80, 64, 64)])
@pytest.mark.parametrize("split", [0, 64])
@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_equals_the_reference(
    num_rows: int, rank: int, k: int, n: int, dtype: torch.dtype, split: int, device: torch.device
) -> None:
    a, b = weights(rank, k, n, dtype, device)
    x, y = torch.randn(num_rows, k, device=device).to(dtype), torch.randn(num_rows, n, device=device).to(dtype)
    slots = slots_of(num_rows, seed=num_rows)
    before, wanted = y.clone(), low_rank_reference(y, x, a, b, torch.tensor(slots, device=device))
    add_low_rank(y, x, a, b, on(device, tile_rows(slots, NUM_SLOTS)), SMALL._replace(split=split))
    assert relative_error(y, wanted) < (1e-5 if dtype == torch.float32 else BFLOAT16_BOUND)
    untouched = [row for row, slot in enumerate(slots) if slot == NOTHING]
    assert torch.equal(y[untouched], before[untouched])


def test_a_row_does_not_depend_on_those_beside_it(device: torch.device) -> None:
    a, b = weights(16, 96, 64, torch.float32, device)
    x = torch.randn(40, 96, device=device)
    slots = [row % NUM_SLOTS for row in range(40)]
    together = torch.zeros(40, 64, device=device)
    add_low_rank(together, x, a, b, on(device, tile_rows(slots, NUM_SLOTS)), SMALL)
    for row in (0, 7, 39):
        alone = torch.zeros(1, 64, device=device)
        add_low_rank(alone, x[row : row + 1], a, b, on(device, tile_rows(slots[row : row + 1], NUM_SLOTS)), SMALL)
        assert torch.equal(alone[0], together[row])


def test_parts_of_wider_tensors(device: torch.device) -> None:
    """Rows of x and y may lie apart: a part of a merged layer's output."""
    a, b = weights(8, 64, 48, torch.float32, device)
    wide_x, wide_y = torch.randn(5, 100, device=device), torch.randn(5, 90, device=device)
    before, slots = wide_y.clone(), [0, 1, NOTHING, 3, 0]
    x, y = wide_x[:, 4:68], wide_y[:, 10:58]
    wanted = low_rank_reference(y, x, a, b, torch.tensor(slots, device=device))
    add_low_rank(y, x, a, b, on(device, tile_rows(slots, NUM_SLOTS)), SMALL)
    assert relative_error(y, wanted) < 1e-5
    assert torch.equal(wide_y[:, :10], before[:, :10])
    assert torch.equal(wide_y[:, 58:], before[:, 58:])
    with pytest.raises(ValueError, match="do not fit"):
        add_low_rank(y, x, a, b[:, :-1], on(device, tile_rows(slots, NUM_SLOTS)))
    with pytest.raises(ValueError, match="contiguous"):
        add_low_rank(y, x, a.transpose(1, 2).contiguous().transpose(1, 2), b, on(device, tile_rows(slots, NUM_SLOTS)))


@pytest.mark.parametrize("num_rows", [1, 3, 16, 33, 200])
def test_tiles_hold_every_row_once_and_have_one_shape(num_rows: int) -> None:
    shapes = set()
    for seed in range(20):
        slots = slots_of(num_rows, seed)
        tiles = tile_rows(slots, NUM_SLOTS)
        shapes.add(tuple(tiles.rows.shape))
        found = {}
        for own, slot in zip(tiles.rows.tolist(), tiles.slots.tolist(), strict=True):
            for row in own:
                if row != NOTHING:
                    assert row not in found
                    found[row] = slot
        assert found == {row: slot for row, slot in enumerate(slots) if slot != NOTHING}
    assert shapes == {(num_tiles(num_rows, NUM_SLOTS), BLOCK_ROWS)}
