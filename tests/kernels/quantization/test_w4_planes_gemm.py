"""GEMMs of packed int4 weights with rows of two int8 planes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.gpu.gemm.split_k import SplitKWorkspace
from kernels.gpu.launching.launch_configs import TileConfig
from kernels.gpu.launching.tuning import W4_PLANES
from kernels.gpu.quantization.quantize import quantize_with_sums
from kernels.gpu.quantization.w4_planes_gemm import w4_planes_gemm
from kernels.quantization.w4a16_gemm import dequantize_w4
from tests.kernels.helpers import relative_error
from tests.kernels.quantization.test_w4a16_gemm import packed_of

CONFIGS = [TileConfig(32, 128, 1, 4, 2, block_m=16), TileConfig(16, 128, 2, 4, 2, block_m=16)]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3, 13])
@pytest.mark.parametrize(("n", "k", "group"), [(48, 256, 128), (37, 384, 32), (37, 128, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_the_reference(
    config: TileConfig, rows: int, n: int, k: int, group: int, has_bias: bool, device: torch.device
) -> None:
    packed = packed_of(n, k, group, device)
    x = torch.randn(rows, k, device=device)
    bias = torch.randn(n, device=device) if has_bias else None
    expected = functional.linear(x.double(), dequantize_w4(packed, torch.float64))
    expected = expected if bias is None else expected + bias.double()
    out = w4_planes_gemm(*quantize_with_sums(x, group), packed, bias, torch.float32, SplitKWorkspace(device), config)
    assert relative_error(out, expected) < 5e-5


@pytest.mark.parametrize("rows", [9, 20, 70])
def test_settings_that_are_chosen_fit(rows: int, device: torch.device) -> None:
    packed, config = packed_of(80, 640, 128, device), W4_PLANES.find(rows, 80, 640)
    assert config is not None
    x = torch.randn(rows, 640, device=device) + 30  # what all columns have in common counts too
    out = w4_planes_gemm(*quantize_with_sums(x, 128), packed, None, torch.float32, SplitKWorkspace(device), config)
    assert relative_error(out, functional.linear(x.double(), dequantize_w4(packed, torch.float64))) < 5e-5


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    packed, workspace = packed_of(32, 64, 32, device), SplitKWorkspace(device)
    quantized = quantize_with_sums(torch.randn(2, 64, device=device), 32)
    with pytest.raises(ValueError, match="64 columns"):
        w4_planes_gemm(*quantized, packed, None, torch.float32, workspace, CONFIGS[0])
