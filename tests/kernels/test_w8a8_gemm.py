from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.gpu.split_k import SplitKWorkspace
from kernels.gpu.w8a8_gemm import w8a8_linear, w8a16_linear
from kernels.w8a8_gemm import quantize_rows_int8
from kernels.w8a8_gemm import w8a8_linear as w8a8_reference
from kernels.w8a8_gemm import w8a16_linear as w8a16_reference
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, relative_error


def test_rounding_is_within_half_a_step() -> None:
    x = torch.randn(5, 64)
    x[2] = 0
    values, scales = quantize_rows_int8(x)
    assert bool(((values * scales[:, None] - x).abs() <= 0.5001 * scales[:, None]).all())
    assert values.abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127]


def test_the_reference_is_the_gemm_of_what_was_quantized() -> None:
    x, weight = torch.randn(3, 64), torch.randn(8, 64)
    values, scales = quantize_rows_int8(weight)
    x_values, x_scales = quantize_rows_int8(x)
    expected = functional.linear(x_values * x_scales[:, None], values * scales[:, None])
    torch.testing.assert_close(w8a8_reference(x, values, scales), expected)
    assert relative_error(w8a8_reference(x, values, scales), functional.linear(x, weight)) < 0.02
    assert relative_error(w8a16_reference(x, values, scales), functional.linear(x, weight)) < 0.01


@pytest.mark.parametrize("rows", [1, 3, 40, 130, 260])
def test_settings_that_are_chosen_fit(rows: int, device: torch.device) -> None:
    x = torch.randn(rows, 272, device=device).to(HALF_DTYPE)
    weight, scales = quantize_rows_int8(torch.randn(80, 272, device=device))
    bias, workspace = torch.randn(80, device=device).to(HALF_DTYPE), SplitKWorkspace(device)
    out = w8a8_linear(x, weight, scales, bias, workspace)
    assert relative_error(out, w8a8_reference(x, weight, scales, bias)) < BFLOAT16_BOUND
    out = w8a16_linear(x, weight, scales, bias, workspace)
    assert relative_error(out, w8a16_reference(x, weight, scales, bias)) < BFLOAT16_BOUND


def test_a_row_is_the_same_in_any_company(device: torch.device) -> None:
    x = torch.randn(20, 256, device=device)
    weight, scales = quantize_rows_int8(torch.randn(64, 256, device=device))
    workspace = SplitKWorkspace(device)
    together = w8a8_linear(x, weight, scales, None, workspace)
    assert torch.equal(together[3:4], w8a8_linear(x[3:4], weight, scales, None, workspace))


def test_sixteen_bits_of_outliers_are_no_worse_than_bfloat16(device: torch.device) -> None:
    """A row as bad as can be for one scale: one element holds nearly all of its norm."""
    x = torch.randn(4, 1024, device=device)
    x[:, 17] = 30 * x.norm(dim=1)
    weight, scales = quantize_rows_int8(torch.randn(64, 1024, device=device))
    expected = functional.linear(x.double(), weight.double()) * scales
    rounded = functional.linear(x.bfloat16().double(), weight.double()) * scales
    out = w8a16_linear(x, weight, scales, None, SplitKWorkspace(device))
    assert relative_error(out, expected) < relative_error(rounded, expected)
