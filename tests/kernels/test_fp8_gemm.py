from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.fp8_gemm import fp8_linear as reference
from kernels.fp8_gemm import quantize_rows_fp8
from kernels.gpu.fp8_gemm import fp8_linear
from kernels.gpu.split_k import SplitKWorkspace
from kernels.gpu.tuning import MAX_FP8_ROWS
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, relative_error


def test_rounding_keeps_four_bits() -> None:
    x = torch.randn(5, 64)
    x[2] = 0
    values, scales = quantize_rows_fp8(x)
    error = (values.float() * scales[:, None] - x).abs()
    assert bool((error <= torch.maximum(x.abs() / 16, scales[:, None] * 2**-10)).all())
    assert values.float().abs().amax(dim=1).tolist() == [448, 448, 0, 448, 448]


def test_the_reference_is_the_gemm_of_what_was_quantized() -> None:
    x, weight = torch.randn(3, 64), torch.randn(8, 64)
    values, scales = quantize_rows_fp8(weight)
    x_values, x_scales = quantize_rows_fp8(x)
    expected = functional.linear(x_values.float() * x_scales[:, None], values.float() * scales[:, None])
    torch.testing.assert_close(reference(x, values, scales), expected)
    assert relative_error(reference(x, values, scales), functional.linear(x, weight)) < 0.06


# Many rows go to torch's GEMM where there is a GPU.
@pytest.mark.parametrize("rows", [1, 3, 40, MAX_FP8_ROWS + 1])
def test_settings_that_are_chosen_fit(rows: int, device: torch.device) -> None:
    x = torch.randn(rows, 272, device=device).to(HALF_DTYPE)
    weight, scales = quantize_rows_fp8(torch.randn(80, 272, device=device))
    bias = torch.randn(80, device=device).to(HALF_DTYPE)
    out = fp8_linear(x, weight, scales, bias, SplitKWorkspace(device))
    assert relative_error(out, reference(x, weight, scales, bias)) < BFLOAT16_BOUND
