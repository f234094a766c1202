from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.quantization.quantize import quantize_rows
from kernels.gpu.quantization.quantized_gemm import dequantize, quantized_gemm
from kernels.gpu.quantization.quantized_tuning import MAX_FP8_ROWS
from kernels.quantization.quantized_gemm import (
    FP8_DTYPE,
    quantize_rows_fp8,
    quantize_rows_int8,
    quantized_linear,
    w8a16_linear,
)
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, QUANTIZERS, relative_error


def test_int8_is_within_half_a_step() -> None:
    x = torch.randn(5, 64)
    x[2] = 0
    values, scales = quantize_rows_int8(x)
    assert bool(((values * scales[:, None] - x).abs() <= 0.5001 * scales[:, None]).all())
    assert values.abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127]


def test_e4m3_keeps_four_bits() -> None:
    x = torch.randn(5, 64)
    x[2] = 0
    values, scales = quantize_rows_fp8(x)
    error = (values.float() * scales[:, None] - x).abs()
    assert bool((error <= torch.maximum(x.abs() / 16, scales[:, None] * 2**-10)).all())
    assert values.float().abs().amax(dim=1).tolist() == [448, 448, 0, 448, 448]


@pytest.mark.parametrize("dtype", QUANTIZERS)
def test_the_reference_is_the_gemm_of_what_was_quantized(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 64), torch.randn(8, 64)
    values, scales = QUANTIZERS[dtype](weight)
    x_values, x_scales = QUANTIZERS[dtype](x)
    expected = functional.linear(x_values.float() * x_scales[:, None], values.float() * scales[:, None])
    torch.testing.assert_close(quantized_linear(x, values, scales), expected)
    bound = 0.02 if dtype == torch.int8 else 0.06
    assert relative_error(quantized_linear(x, values, scales), functional.linear(x, weight)) < bound
    assert relative_error(w8a16_linear(x, values, scales), functional.linear(x, weight)) < bound / 2 + 0.01


# Many rows of e4m3 go to torch's GEMM where there is a GPU.
@pytest.mark.parametrize("dtype", QUANTIZERS)
@pytest.mark.parametrize("rows", [1, 3, 40, 130, MAX_FP8_ROWS + 1])
def test_settings_that_are_chosen_fit(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(rows, 272, device=device).to(HALF_DTYPE)
    weight, scales = QUANTIZERS[dtype](torch.randn(80, 272, device=device))
    bias, workspace = torch.randn(80, device=device).to(HALF_DTYPE), SplitKWorkspace(device)
    out = quantized_gemm(*quantize_rows(x, dtype), weight, scales, bias, x.dtype, workspace)
    assert relative_error(out, quantized_linear(x, weight, scales, bias)) < BFLOAT16_BOUND
    if dtype != FP8_DTYPE:
        out = quantized_gemm(*quantize_rows(x, dtype, 2), weight, scales, bias, x.dtype, workspace)
        assert relative_error(out, w8a16_linear(x, weight, scales, bias)) < BFLOAT16_BOUND


def test_writing_weights_out(device: torch.device) -> None:
    weight, scales = quantize_rows_int8(torch.randn(5, 2304, device=device))
    torch.testing.assert_close(dequantize(weight, scales, torch.float32), weight.float() * scales[:, None])


def test_a_row_is_the_same_in_any_company(device: torch.device) -> None:
    x = torch.randn(20, 256, device=device)
    weight, scales = quantize_rows_int8(torch.randn(64, 256, device=device))
    together, alone = (
        quantized_gemm(*quantize_rows(rows, torch.int8), weight, scales, None, x.dtype, SplitKWorkspace(device))
        for rows in (x, x[3:4])
    )
    assert torch.equal(together[3:4], alone)


def test_sixteen_bits_of_outliers_are_no_worse_than_bfloat16(device: torch.device) -> None:
    """The worst row for a single scale: one element has nearly all of its norm."""
    x = torch.randn(4, 1024, device=device)
    x[:, 17] = 30 * x.norm(dim=1)
    weight, scales = quantize_rows_int8(torch.randn(64, 1024, device=device))
    expected = functional.linear(x.double(), weight.double()) * scales
    rounded = functional.linear(x.bfloat16().double(), weight.double()) * scales
    out = quantized_gemm(*quantize_rows(x, torch.int8, 2), weight, scales, None, x.dtype, SplitKWorkspace(device))
    assert relative_error(out, expected) < relative_error(rounded, expected)
