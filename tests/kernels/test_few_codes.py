"""Products of a few rows of codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.fp8_gemm import FP8_DTYPE, quantize_rows_fp8
from kernels.gpu.few_codes import FewConfig, choose_few, few_rows, few_rows_gated
from kernels.gpu.quantize import quantize_rows
from kernels.silu_mul import silu_mul
from kernels.w8a8_gemm import quantize_rows_int8
from tests.kernels.helpers import relative_error

REFERENCES = {torch.int8: quantize_rows_int8, FP8_DTYPE: quantize_rows_fp8}
CONFIGS = [FewConfig(16, 32, 2, 2), FewConfig(16, 32, 2, 2, 2, 4)]


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.double() * scales.double()[:, None]


@pytest.mark.parametrize("dtype", REFERENCES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 256), (5, 37, 144), (13, 32, 320)])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_with_and_without_gate(
    dtype: torch.dtype, rows: int, n: int, k: int, config: FewConfig, has_bias: bool, device: torch.device
) -> None:
    codes, x_scales = REFERENCES[dtype](torch.randn(rows, k, device=device))
    weight, scales = REFERENCES[dtype](torch.randn(2 * n, k, device=device))
    bias = torch.randn(2 * n, device=device) if has_bias else None
    expected = functional.linear(dequantized(codes, x_scales), dequantized(weight, scales))
    expected = expected if bias is None else expected + bias.double()
    out = few_rows(codes, x_scales, weight, scales, bias, torch.float32, config)
    assert relative_error(out, expected) < 1e-6
    inner, maxima = few_rows_gated(codes, x_scales, weight, scales, bias, torch.float32, config)
    assert relative_error(inner, silu_mul(expected.float())) < 1e-5
    assert torch.equal(maxima.amax(dim=1), inner.abs().amax(dim=1))


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("config", CONFIGS)
def test_rows_of_two_digits(rows: int, config: FewConfig, device: torch.device) -> None:
    x = torch.randn(rows, 144, device=device, dtype=torch.float64)
    weight, scales = quantize_rows_int8(torch.randn(2 * 37, 144, device=device))
    codes, x_scales = quantize_rows(x.float(), torch.int8, 2)
    expected = functional.linear(x, dequantized(weight, scales))
    assert relative_error(few_rows(codes, x_scales, weight, scales, None, torch.float32, config), expected) < 5e-5
    inner, maxima = few_rows_gated(codes, x_scales, weight, scales, None, torch.float32, config)
    assert inner.shape == (rows, 37)
    assert relative_error(inner, silu_mul(expected.float())) < 1e-4
    assert torch.equal(maxima.amax(dim=1), inner.abs().amax(dim=1))


def test_what_is_not_finite_shows_in_the_maxima(device: torch.device) -> None:
    codes, x_scales = quantize_rows_int8(torch.randn(3, 64, device=device))
    weight, scales = quantize_rows_int8(torch.randn(64, 64, device=device))
    x_scales[1] = float("nan")
    _, maxima = few_rows_gated(codes, x_scales, weight, scales, None, torch.float32, CONFIGS[0])
    assert maxima.amax(dim=1).isfinite().tolist() == [True, False, True]


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight, scales = quantize_rows_int8(torch.randn(64, 64, device=device))
    codes, x_scales = quantize_rows_int8(torch.randn(17, 64, device=device))
    assert choose_few(17, 64, 64) is None
    with pytest.raises(ValueError, match="too many"):
        few_rows(codes, x_scales, weight, scales, None, torch.float32, CONFIGS[0])
    with pytest.raises(ValueError, match="contiguous"):
        few_rows(codes[:2], x_scales, weight.T, scales, None, torch.float32, CONFIGS[0])
