"""Quantization of activations by the kernels that produce them."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import rms_norm, silu_mul
from kernels.gpu.quantization.quantize import (
    MAXIMA_BLOCK,
    add_rms_norm_quantize,
    quantize_many_rows,
    quantize_rows,
    quantize_with_maxima,
    silu_mul_quantize,
)
from kernels.quantization.quantized_gemm import FP8_DTYPE
from tests.kernels.helpers import QUANTIZERS, relative_error


@pytest.mark.parametrize("dtype", QUANTIZERS)
def test_rows_equal_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(5, 80, device=device).mul_(3).to(torch.float16)[:, :72]
    x[3] = 0
    values, scales = quantize_rows(x, dtype)
    expected_values, expected_scales = QUANTIZERS[dtype](x)
    torch.testing.assert_close(scales, expected_scales)
    assert (values.float() - expected_values.float()).abs().max() == 0
    assert not values[3].float().any()
    assert not scales[3]


@pytest.mark.parametrize(("num_rows", "k"), [(131, 72), (3, 4200)])
def test_many_rows_are_quantized_as_each_is(num_rows: int, k: int, device: torch.device) -> None:
    x = torch.randn(num_rows, k, device=device).mul_(3).to(torch.float16)
    x[1] = 0
    for ours, theirs in zip(quantize_many_rows(x), quantize_rows(x, FP8_DTYPE), strict=True):
        assert torch.equal(ours.float(), theirs.float())


def of_two_planes(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    numbers = 256 * values[0::2].double() + values[1::2].double()
    assert numbers.abs().amax(dim=1).tolist() == [32639.0] * len(numbers)
    return numbers * scales.double()[:, None]


def test_two_planes_hold_16_bits(device: torch.device) -> None:
    x = torch.randn(5, 80, device=device).mul_(3)[:, :72]
    x[1, 3], x[2, 4] = x[1].abs().max() * 2, x[2].abs().max() * -2
    values, scales = quantize_rows(x, torch.int8, 2)
    assert values.shape == (10, 72)
    largest = x.abs().amax(dim=1, keepdim=True)
    assert ((of_two_planes(values, scales) - x).abs() <= 0.501 * largest / 32639).all()
    with pytest.raises(ValueError, match="planes"):
        quantize_rows(x, FP8_DTYPE, 2)


def test_fused_kernels_write_two_planes(device: torch.device) -> None:
    residual, norm = torch.randn(5, 72, device=device) * 3, torch.randn(72, device=device)
    expected = rms_norm(residual, norm, 1e-6)
    assert (
        relative_error(of_two_planes(*add_rms_norm_quantize(None, residual, norm, 1e-6, torch.int8, 2)), expected)
        < 1e-4
    )
    gate_up = torch.randn(5, 144, device=device)
    expected = silu_mul(gate_up)
    assert relative_error(of_two_planes(*silu_mul_quantize(gate_up, torch.int8, 2)), expected) < 1e-4
    x = torch.randn(3, MAXIMA_BLOCK + 72, device=device)
    known = quantize_with_maxima(x, x.abs().view(3, 20, -1).amax(dim=2), torch.int8, 2)
    for mine, direct in zip(known, quantize_rows(x, torch.int8, 2), strict=True):
        assert torch.equal(mine, direct)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("dtype", QUANTIZERS)
def test_what_is_not_finite_shows_in_the_scale(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, 72, device=device)
    x[0, 7], x[1, 9] = float("nan"), float("inf")
    _, scales = quantize_rows(x, dtype)
    assert scales.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", QUANTIZERS)
@pytest.mark.parametrize("shape", [(), (5, 72), (3, 5, 72)], ids=["alone", "output", "partial sums"])
def test_add_rms_norm_quantize(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    residual, norm = torch.randn(5, 72, device=device) * 3, torch.randn(72, device=device)
    x = torch.randn(shape, device=device) if shape else None
    total = residual if x is None else residual + x.view(-1, 5, 72).sum(dim=0)
    expected_values, expected_scales = QUANTIZERS[dtype](rms_norm(total, norm, 1e-6))
    values, scales = add_rms_norm_quantize(x, residual, norm, 1e-6, dtype)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(scales, expected_scales)
    assert relative_error(values.float(), expected_values.float()) < 5e-3  # at the edge of two values: either


@pytest.mark.parametrize("dtype", QUANTIZERS)
def test_silu_mul_quantize(dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(5, 144, device=device)
    expected_values, expected_scales = QUANTIZERS[dtype](silu_mul(gate_up))
    values, scales = silu_mul_quantize(gate_up, dtype)
    torch.testing.assert_close(scales, expected_scales)
    assert relative_error(values.float(), expected_values.float()) < 5e-3


@pytest.mark.parametrize("dtype", QUANTIZERS)
def test_quantize_with_maxima(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, MAXIMA_BLOCK + 72, device=device)
    x[1] = 0
    maxima = x.abs().view(3, 20, -1).amax(dim=2)
    values, scales = quantize_with_maxima(x, maxima, dtype)
    expected_values, expected_scales = quantize_rows(x, dtype)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.float(), expected_values.float())
    maxima[2, 5] = float("nan")
    assert quantize_with_maxima(x, maxima, dtype)[1].isfinite().tolist() == [True, True, False]
