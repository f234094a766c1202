"""Rows of several adapters and of none in one launch each of shrink and expand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.gpu.lora.look_up import look_up
from kernels.gpu.lora.low_rank import LowRankConfig, SlotWeights, expand, low_rank_reference, shrink, strip_of_modules
from kernels.gpu.lora.row_tiles import BLOCK_ROWS, NOTHING, RowTiles, num_tiles, tile_rows
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, relative_error

NUM_SLOTS = 4
SMALL = LowRankConfig(32, 64, 1, 1, 32, 64, 1, 1, few_split=64, few_warps=1)


def slots_of(num_rows: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(-1, NUM_SLOTS) for _ in range(num_rows)]


def on(device: torch.device, slots: list[int]) -> RowTiles:
    return RowTiles(*(part.to(device) for part in tile_rows(slots, NUM_SLOTS)))


def weights(max_rank: int, k: int, starts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> SlotWeights:
    """Make adapters of several ranks, one without a certain module. Weights beyond a rank are NaN."""
    found = SlotWeights.empty(NUM_SLOTS, max_rank, k, starts, dtype, device)
    found.a.copy_(torch.randn(found.a.shape, device=device) * k**-0.5)
    found.b.copy_(torch.randn(found.b.shape, device=device))
    for slot in range(NUM_SLOTS):
        for module, (first, stop) in enumerate(pairwise(starts)):
            rank = max_rank if slot == 0 else (slot * 5 + module) % max_rank
            found.ranks[slot, module] = rank
            found.a[slot, module, rank:] = torch.nan
            found.b[slot, rank:, first:stop] = torch.nan
    found.ranks[1, -1] = 0
    return found


def reference(y: Tensor, x: Tensor, own: SlotWeights, slots: list[int]) -> Tensor:
    finite = own._replace(a=own.a.nan_to_num(), b=own.b.nan_to_num())
    return low_rank_reference(y, x, finite, torch.tensor(slots, device=y.device))


def add(y: Tensor, x: Tensor, own: SlotWeights, tiles: RowTiles, config: LowRankConfig = SMALL) -> None:
    expand(y, shrink(x, own, tiles, config), own, tiles, config)


@pytest.mark.parametrize("num_rows", [1, 2, 15, 70])
@pytest.mark.parametrize(
    ("max_rank", "k", "starts"), [(8, 64, (0, 48)), (16, 96, (0, 64, 96, 130)), (40, 136, (0, 32, 64))]
)
@pytest.mark.parametrize("strip", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_equals_the_reference(
    num_rows: int, max_rank: int, k: int, starts: tuple[int, ...], dtype: torch.dtype, strip: int,
    device: torch.device,
) -> None:  # fmt: skip
    own = weights(max_rank, k, starts, dtype, device)
    x, y = (torch.randn(num_rows, size, device=device).to(dtype) for size in (k, starts[-1]))
    slots = slots_of(num_rows, seed=num_rows)
    before, wanted = y.clone(), reference(y, x, own, slots)
    add(y, x, own, on(device, slots), SMALL._replace(strip=strip))
    assert relative_error(y, wanted) < (1e-5 if dtype == torch.float32 else BFLOAT16_BOUND)
    untouched = [row for row, slot in enumerate(slots) if slot == NOTHING]
    assert torch.equal(y[untouched], before[untouched])


@pytest.mark.parametrize("num_rows", [1, 15, 70])
@pytest.mark.parametrize(("max_rank", "first_id"), [(8, 0), (40, 30)])
def test_an_embedding_looks_up_columns(num_rows: int, max_rank: int, first_id: int, device: torch.device) -> None:
    """The result is that of one-hot rows of x. Tokens outside of a rank's part of the vocabulary add nothing."""
    own = weights(max_rank, 53, (0, 48), torch.float32, device)
    token_ids = torch.tensor([(row * 31) % 90 for row in range(num_rows)], device=device)
    one_hot = torch.zeros(num_rows, 90 + 53, device=device).scatter_(1, token_ids[:, None], 1)
    x, y = one_hot[:, first_id : first_id + 53], torch.randn(num_rows, 48, device=device)
    slots = slots_of(num_rows, seed=num_rows)
    wanted, tiles = reference(y, x, own, slots), on(device, slots)
    expand(y, look_up(token_ids, own, tiles, first_id), own, tiles, SMALL)
    assert relative_error(y, wanted) < 1e-5


def test_a_row_does_not_depend_on_those_beside_it(device: torch.device) -> None:
    """If an adapter has at most four rows: more are multiplied by tensor cores, in another order."""
    own = weights(16, 96, (0, 64), torch.float32, device)
    x = torch.randn(14, 96, device=device)
    slots = [row % NUM_SLOTS for row in range(14)]
    together = torch.zeros(14, 64, device=device)
    add(together, x, own, on(device, slots))
    for row in (0, 7, 13):
        alone = torch.zeros(1, 64, device=device)
        add(alone, x[row : row + 1], own, on(device, slots[row : row + 1]))
        assert torch.equal(alone[0], together[row])


def test_parts_of_wider_tensors(device: torch.device) -> None:
    """Rows of x and y may have gaps between them, as a part of a merged layer's output has."""
    own = weights(8, 64, (0, 48), torch.float32, device)
    wide_x, wide_y = torch.randn(5, 100, device=device), torch.randn(5, 90, device=device)
    before, slots = wide_y.clone(), [0, 1, NOTHING, 3, 0]
    x, y = wide_x[:, 4:68], wide_y[:, 10:58]
    wanted = reference(y, x, own, slots)
    add(y, x, own, on(device, slots))
    assert relative_error(y, wanted) < 1e-5
    assert torch.equal(wide_y[:, :10], before[:, :10])
    assert torch.equal(wide_y[:, 58:], before[:, 58:])


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    own, tiles = weights(8, 64, (0, 48), torch.float32, device), on(device, [0])
    x, y = torch.zeros(1, 64, device=device), torch.zeros(1, 40, device=device)
    with pytest.raises(ValueError, match="does not fit"):
        shrink(x[:, :60], own, tiles, SMALL)
    with pytest.raises(ValueError, match="does not fit"):
        expand(y, shrink(x, own, tiles, SMALL), own, tiles, SMALL)
    with pytest.raises(ValueError, match="cannot be one layer's"):
        strip_of_modules((0, 24, 48), 128)
    assert strip_of_modules((0, 3584, 4096, 4608), 128) == 128
    assert strip_of_modules((0, 96, 128), 128) == 32
    assert strip_of_modules((0, 100), 512) == 512


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
        of_rows = [NOTHING if tile == NOTHING else tiles.slots[tile].item() for tile in tiles.tile_of_row.tolist()]
        assert of_rows == slots
        for row, tile in enumerate(tiles.tile_of_row.tolist()):
            assert tile == NOTHING or row in tiles.rows[tile]
    assert shapes == {(num_tiles(num_rows, NUM_SLOTS), BLOCK_ROWS)}
