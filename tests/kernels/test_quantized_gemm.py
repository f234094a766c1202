"""What int8 and e4m3 GEMMs share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.fp8_gemm import FP8_DTYPE, quantize_rows_fp8
from kernels.gpu.quantize import quantize_rows
from kernels.gpu.quantized_gemm import TileConfig, tiled_gemm
from kernels.gpu.split_k import SplitKWorkspace
from kernels.w8a8_gemm import quantize_rows_int8
from tests.kernels.helpers import relative_error

REFERENCES = {torch.int8: quantize_rows_int8, FP8_DTYPE: quantize_rows_fp8}


def dequantized(values: Tensor, scales: Tensor) -> Tensor:
    return values.double() * scales.double()[:, None]


@pytest.mark.parametrize("dtype", REFERENCES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 128), (5, 37, 80), (33, 48, 128)])
@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_tiled_gemm(
    dtype: torch.dtype, rows: int, n: int, k: int, split_k: int, has_bias: bool, device: torch.device
) -> None:
    values, x_scales = REFERENCES[dtype](torch.randn(rows, k, device=device))
    weight, scales = REFERENCES[dtype](torch.randn(n, k, device=device))
    bias = torch.randn(n, device=device) if has_bias else None
    workspace = SplitKWorkspace(device)
    workspace.partials.fill_(float("nan"))
    expected = functional.linear(dequantized(values, x_scales), dequantized(weight, scales))
    expected = expected if bias is None else expected + bias.double()
    config = TileConfig(16, 32, 32, split_k, num_stages=2)
    for _ in range(2):  # the second launch finds the counters as the first left them
        out = tiled_gemm(values, x_scales, weight, scales, bias, torch.float32, workspace, config)
        assert relative_error(out, expected) < (1e-6 if dtype == torch.int8 else 1e-3)
        assert not workspace.counters.any()


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("split_k", [1, 2])
def test_two_planes(rows: int, split_k: int, device: torch.device) -> None:
    x = torch.randn(rows, 80, device=device, dtype=torch.float64)
    weight, scales = quantize_rows_int8(torch.randn(48, 80, device=device))
    values, x_scales = quantize_rows(x.float(), torch.int8, 2)
    config = TileConfig(16, 32, 32, split_k, num_stages=2)
    out = tiled_gemm(values, x_scales, weight, scales, None, torch.float32, SplitKWorkspace(device), config)
    assert relative_error(out, functional.linear(x, dequantized(weight, scales))) < 5e-5


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight, scales = quantize_rows_int8(torch.randn(48, 64, device=device))
    values, x_scales = quantize_rows_int8(torch.randn(2, 64, device=device))
    workspace = SplitKWorkspace(device, num_floats=16)
    with pytest.raises(ValueError, match="too small"):
        tiled_gemm(values, x_scales, weight, scales, None, torch.float32, workspace, TileConfig(16, 32, 32, 2))
    with pytest.raises(ValueError, match="contiguous"):
        tiled_gemm(values[:, :48], x_scales, weight.T, scales, None, torch.float32, workspace, TileConfig(16, 32, 32))
