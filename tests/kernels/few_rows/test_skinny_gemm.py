from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from kernels.gpu.few_rows.few_row_tuning import SKINNY
from kernels.gpu.few_rows.gemm_configs import TileConfig
from kernels.gpu.few_rows.skinny_gemm import skinny_gemm
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.quantization.quantize import quantize_rows
from kernels.quantization.quantized_gemm import quantize_rows_int8
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, QUANTIZERS, dequantized, relative_error

CONFIGS = [TileConfig(16, 32, split_k, 4, 2) for split_k in (1, 3)]
QUANTIZED_CONFIGS = [TileConfig(32, 32, split_k, 4, 2, block_m=16) for split_k in (1, 3)]


def poisoned_workspace(device: torch.device) -> SplitKWorkspace:
    """Return a workspace of NaN, so that partial sums that are read before they are written show."""
    workspace = SplitKWorkspace(device)
    workspace.partials.fill_(float("nan"))
    return workspace


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (37, 72)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_equals_the_reference(
    config: TileConfig, rows: int, n: int, k: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(rows, k + 8, device=device).to(dtype)[:, :k]
    weight = torch.randn(n, k, device=device).to(dtype)
    bias = torch.randn(n, device=device).to(dtype) if has_bias else None
    workspace = poisoned_workspace(device)
    expected = functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    for _ in range(2):  # the second launch starts with the counters that the first one left
        out = skinny_gemm(x, weight, bias, workspace, config)
        assert relative_error(out, expected) < (1e-6 if dtype == torch.float32 else BFLOAT16_BOUND)
        assert not workspace.counters.any()


@pytest.mark.parametrize("dtype", QUANTIZERS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 128), (5, 37, 80), (33, 48, 128)])
@pytest.mark.parametrize("config", QUANTIZED_CONFIGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_quantized_rows_and_weights(
    dtype: torch.dtype, rows: int, n: int, k: int, config: TileConfig, has_bias: bool, device: torch.device
) -> None:
    x, x_scales = QUANTIZERS[dtype](torch.randn(rows, k, device=device))
    weight, scales = QUANTIZERS[dtype](torch.randn(n, k, device=device))
    bias = torch.randn(n, device=device) if has_bias else None
    workspace = poisoned_workspace(device)
    expected = functional.linear(dequantized(x, x_scales), dequantized(weight, scales))
    expected = expected if bias is None else expected + bias.double()
    for _ in range(2):
        out = skinny_gemm(x, weight, bias, workspace, config, x_scales, scales, torch.float32)
        assert relative_error(out, expected) < (1e-6 if dtype == torch.int8 else 1e-3)
        assert not workspace.counters.any()


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("config", QUANTIZED_CONFIGS)
def test_two_planes(rows: int, config: TileConfig, device: torch.device) -> None:
    x = torch.randn(rows, 80, device=device, dtype=torch.float64)
    weight, scales = quantize_rows_int8(torch.randn(48, 80, device=device))
    planes, x_scales = quantize_rows(x.float(), torch.int8, 2)
    out = skinny_gemm(planes, weight, None, SplitKWorkspace(device), config, x_scales, scales, torch.float32)
    assert relative_error(out, functional.linear(x, dequantized(weight, scales))) < 5e-5


def test_more_rows_than_a_tile(device: torch.device) -> None:
    x, weight = torch.randn(40, 72, device=device), torch.randn(37, 72, device=device)
    out = skinny_gemm(x, weight, None, SplitKWorkspace(device), replace(CONFIGS[1], block_m=16))
    assert relative_error(out, functional.linear(x, weight)) < 1e-6


def test_a_row_is_the_same_in_any_company(device: torch.device) -> None:
    x, weight = torch.randn(9, 128, device=device).to(HALF_DTYPE), torch.randn(48, 128, device=device).to(HALF_DTYPE)
    workspace = SplitKWorkspace(device)
    together = skinny_gemm(x, weight, None, workspace, CONFIGS[1])
    assert torch.equal(together[3:4], skinny_gemm(x[3:4], weight, None, workspace, CONFIGS[1]))


@pytest.mark.parametrize("rows", [2, 32])
@pytest.mark.parametrize(("n", "k"), [(256, 512), (512, 256), (4608, 64)])
def test_settings_that_are_chosen_fit(rows: int, n: int, k: int, device: torch.device) -> None:
    config = SKINNY.find(rows, n, k)
    assert config is not None
    x, weight = torch.randn(rows, k, device=device), torch.randn(n, k, device=device)
    out = skinny_gemm(x, weight, None, SplitKWorkspace(device), replace(config, num_stages=1))
    assert relative_error(out, functional.linear(x, weight)) < 1e-6


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight = torch.randn(2, 64, device=device), torch.randn(48, 64, device=device)
    workspace = SplitKWorkspace(device, num_floats=16)
    with pytest.raises(ValueError, match="too small"):
        skinny_gemm(x, weight, None, workspace, CONFIGS[1])
    with pytest.raises(ValueError, match="contiguous"):
        skinny_gemm(x[:, :48], weight.T, None, workspace, CONFIGS[0])
