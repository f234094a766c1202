"""GEMMs of few rows that continue over the adapters of all rows, alone and with the activation of gate and up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.few_rows.gemm_configs import TileConfig
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.lora.adapted_gemm import adapted_gemm, gemm_config_of
from kernels.gpu.lora.gated_rows import gated_rows
from kernels.gpu.lora.low_rank import SlotWeights
from kernels.gpu.lora.row_tiles import RowTiles
from kernels.gpu.lora.tile_shrink import TileShrinkConfig, shrink_config_of, shrink_workspace, tile_shrink
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, relative_error
from tests.kernels.lora.test_low_rank import NUM_SLOTS, on, reference, slots_of, weights

ONE_PROGRAM, SEVERAL = TileShrinkConfig(32, 256, 1, 1), TileShrinkConfig(32, 64, 1, 2)
SHAPES = pytest.mark.parametrize(
    ("max_rank", "k", "starts"), [(16, 96, (0, 64, 96, 128)), (40, 136, (0, 32, 104)), (8, 64, (0, 48))]
)
ROWS = pytest.mark.parametrize(("num_rows", "num_own"), [(1, 1), (5, 5), (37, 37), (64, 9)])


class Gemm:
    """x, W, b and adapters of `num_rows` rows.

    num_own: rows that have adapters, or none, in turn; all others have the same one, in several tiles.
    """

    def __init__(
        self, num_rows: int, num_own: int, max_rank: int, k: int, starts: tuple[int, ...], device: torch.device
    ) -> None:
        self.own = finite(weights(max_rank, k, starts, HALF_DTYPE, device))
        self.x = torch.randn(num_rows, k, device=device).to(HALF_DTYPE)
        self.weight = (torch.randn(starts[-1], k, device=device) * k**-0.5).to(HALF_DTYPE)
        self.bias = torch.randn(starts[-1], device=device).to(HALF_DTYPE)
        self.slots = [*slots_of(num_own, seed=num_rows), *[2] * (num_rows - num_own)]
        self.workspaces = SplitKWorkspace(device, 1 << 20, 1 << 10), SplitKWorkspace(device, 1 << 20, 1 << 10)

    def wanted(self, bias: Tensor | None) -> Tensor:
        plain = functional.linear(self.x.double(), self.weight.double(), None if bias is None else bias.double())
        return reference(plain, self.x, self.own, self.slots)

    def shrunk(self, rows: list[int], config: TileShrinkConfig = SEVERAL) -> tuple[Tensor, Tensor, RowTiles]:
        """Return some rows of x, their H and their tiles."""
        x, tiles = self.x[rows], on(self.x.device, [self.slots[row] for row in rows])
        return x, tile_shrink(x, self.own, tiles, self.workspaces[1], config), tiles

    def run(self, rows: list[int], config: TileConfig, shrink: TileShrinkConfig = SEVERAL) -> Tensor:
        x, h, tiles = self.shrunk(rows, shrink)
        return adapted_gemm(x, self.weight, self.bias, h, self.own, tiles, self.workspaces[0], config)

    def gated(self, rows: list[int], bias: Tensor | None) -> Tensor:
        x, h, tiles = self.shrunk(rows)
        return gated_rows(x, self.weight, bias, h, self.own, tiles)


def finite(own: SlotWeights) -> SlotWeights:
    """Replace B beyond the ranks by numbers that would show: the kernels multiply them by zeros."""
    return own._replace(b=own.b.nan_to_num(nan=1e3))


@SHAPES
@ROWS
@pytest.mark.parametrize(("split_k", "shrink"), [(1, ONE_PROGRAM), (3, SEVERAL)])
def test_equals_the_reference(
    num_rows: int, num_own: int, max_rank: int, k: int, starts: tuple[int, ...], split_k: int,
    shrink: TileShrinkConfig, device: torch.device,
) -> None:  # fmt: skip
    gemm = Gemm(num_rows, num_own, max_rank, k, starts, device)
    y = gemm.run([*range(num_rows)], TileConfig(32 if len(starts) > 2 else 16, 32, split_k, 1, 2), shrink)
    assert relative_error(y, gemm.wanted(gemm.bias)) < BFLOAT16_BOUND


@ROWS
@pytest.mark.parametrize(("max_rank", "k", "n"), [(16, 64, 64), (40, 136, 72)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up(
    num_rows: int, num_own: int, max_rank: int, k: int, n: int, has_bias: bool, device: torch.device
) -> None:
    gemm = Gemm(num_rows, num_own, max_rank, k, (0, n, 2 * n), device)
    bias = gemm.bias if has_bias else None
    gate, up = gemm.wanted(bias).chunk(2, dim=1)
    y = gemm.gated([*range(num_rows)], bias)
    assert relative_error(y, functional.silu(gate) * up) < 2 * BFLOAT16_BOUND


def test_a_row_does_not_depend_on_other_rows(device: torch.device) -> None:
    gemm = Gemm(40, 40, 16, 96, (0, 32, 64), device)
    gemm.slots = [row % (NUM_SLOTS + 1) - 1 for row in range(40)]
    some = [3, 39, 8, 0, *range(9, 38)]  # as many as take the same tiles of rows
    for run in (lambda rows: gemm.run(rows, TileConfig(32, 32, 2, 1, 2)), lambda rows: gemm.gated(rows, None)):
        assert torch.equal(run(some), run([*range(40)])[some])


def test_settings_of_layers() -> None:
    """A layer of whole tiles of 16-bit weights has one; narrow layers share K, but not in too small parts."""
    device = torch.device("meta")

    def of_layer(k: int, *starts: int, dtype: torch.dtype = torch.bfloat16) -> SlotWeights:
        return SlotWeights.empty(2, 16, k, starts, dtype, device)

    qkv, down, small = of_layer(3584, 0, 3584, 4096, 4608), of_layer(18944, 0, 3584), of_layer(1024, 0, 1024)
    splits = [config and config.split_k for config in map(gemm_config_of, (qkv, down, small))]
    assert splits == [1, 4, 1]
    assert [shrink_config_of(each).split for each in (qkv, down, small)] == [2048, 4096, 1024]
    assert gemm_config_of(of_layer(64, 0, 96, 128)) is None
    assert gemm_config_of(of_layer(64, 0, 128, dtype=torch.float32)) is None


def test_the_workspace_is_large_enough_for_all_layers(device: torch.device) -> None:
    """K that two programs share, with many ranks, and K of a single one with more modules."""
    layers = [weights(40, 1100, (0, 64), HALF_DTYPE, device), weights(40, 96, (0, 64, 96, 128), HALF_DTYPE, device)]
    workspace, tiles = shrink_workspace(layers, device), on(device, slots_of(64))
    for own in layers:
        x = torch.randn(64, own.a.shape[3], device=device).to(HALF_DTYPE)
        tile_shrink(x, finite(own), tiles, workspace)
    partials = [8 * 3 * 2, 8 * 3 * 3]  # tiles, blocks of 16 ranks, programs; tiles, blocks, modules
    assert workspace.partials.numel() == max(partials) * 16 * 16
    assert workspace.counters.numel() == 8 * 3 * 3
    assert not workspace.counters.any()


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    gemm = Gemm(1, 1, 16, 96, (0, 64, 96), device)
    x, h, tiles = gemm.shrunk([0])
    with pytest.raises(ValueError, match="does not fit"):
        tile_shrink(x[:, :60], gemm.own, tiles, gemm.workspaces[1], SEVERAL)
    with pytest.raises(ValueError, match="do not fit adapters"):
        adapted_gemm(x, gemm.weight[:64], None, h, gemm.own, tiles, gemm.workspaces[0], TileConfig(32, 32))
    with pytest.raises(ValueError, match="modules of whole tiles"):
        adapted_gemm(x, gemm.weight, None, h, gemm.own, tiles, gemm.workspaces[0], TileConfig(128, 32))
    with pytest.raises(ValueError, match="do not fit adapters"):
        gated_rows(x, gemm.weight, None, h, gemm.own, tiles)
