"""Skinny GEMMs of a few quantized rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.elementwise import silu_mul
from kernels.gpu.quantization.quantize import quantize_rows
from kernels.gpu.quantization.quantized_tuning import SLICED_K, SlicedKConfig
from kernels.gpu.quantization.sliced_k_gemm import sliced_k_gated_gemm, sliced_k_gemm
from kernels.quantization.quantized_gemm import quantize_rows_int8
from tests.kernels.helpers import QUANTIZERS, dequantized, relative_error

CONFIGS = [SlicedKConfig(16, 32, 2, 2), SlicedKConfig(16, 32, 2, 2, 2, 4)]


@pytest.mark.parametrize("dtype", QUANTIZERS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 256), (5, 37, 144), (13, 32, 320)])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gemm_with_and_without_gate(
    dtype: torch.dtype, rows: int, n: int, k: int, config: SlicedKConfig, has_bias: bool, device: torch.device
) -> None:
    values, x_scales = QUANTIZERS[dtype](torch.randn(rows, k, device=device))
    weight, scales = QUANTIZERS[dtype](torch.randn(2 * n, k, device=device))
    bias = torch.randn(2 * n, device=device) if has_bias else None
    expected = functional.linear(dequantized(values, x_scales), dequantized(weight, scales))
    expected = expected if bias is None else expected + bias.double()
    out = sliced_k_gemm(values, x_scales, weight, scales, bias, torch.float32, config)
    assert relative_error(out, expected) < 1e-6
    inner, maxima = sliced_k_gated_gemm(values, x_scales, weight, scales, bias, torch.float32, config)
    assert relative_error(inner, silu_mul(expected.float())) < 1e-5
    assert torch.equal(maxima.amax(dim=1), inner.abs().amax(dim=1))


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("config", CONFIGS)
def test_rows_of_two_planes(rows: int, config: SlicedKConfig, device: torch.device) -> None:
    x = torch.randn(rows, 144, device=device, dtype=torch.float64)
    weight, scales = quantize_rows_int8(torch.randn(2 * 37, 144, device=device))
    values, x_scales = quantize_rows(x.float(), torch.int8, 2)
    expected = functional.linear(x, dequantized(weight, scales))
    assert (
        relative_error(sliced_k_gemm(values, x_scales, weight, scales, None, torch.float32, config), expected) < 5e-5
    )
    inner, maxima = sliced_k_gated_gemm(values, x_scales, weight, scales, None, torch.float32, config)
    assert inner.shape == (rows, 37)
    assert relative_error(inner, silu_mul(expected.float())) < 1e-4
    assert torch.equal(maxima.amax(dim=1), inner.abs().amax(dim=1))


def test_what_is_not_finite_shows_in_the_maxima(device: torch.device) -> None:
    values, x_scales = quantize_rows_int8(torch.randn(3, 64, device=device))
    weight, scales = quantize_rows_int8(torch.randn(64, 64, device=device))
    x_scales[1] = float("nan")
    _, maxima = sliced_k_gated_gemm(values, x_scales, weight, scales, None, torch.float32, CONFIGS[0])
    assert maxima.amax(dim=1).isfinite().tolist() == [True, False, True]


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight, scales = quantize_rows_int8(torch.randn(64, 64, device=device))
    values, x_scales = quantize_rows_int8(torch.randn(17, 64, device=device))
    assert SLICED_K.find(17, 64, 64) is None
    with pytest.raises(ValueError, match="too many"):
        sliced_k_gemm(values, x_scales, weight, scales, None, torch.float32, CONFIGS[0])
    with pytest.raises(ValueError, match="contiguous"):
        sliced_k_gemm(values[:2], x_scales, weight.T, scales, None, torch.float32, CONFIGS[0])
