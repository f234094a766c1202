"""Parts that int8 and e4m3 products share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.fp8_gemm import FP8_DTYPE, quantize_rows_fp8
from kernels.gpu.eight_bit import RowConfig, RowsConfig, one_row, several_rows
from kernels.gpu.small_m_gemm import SmallMWorkspace
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from kernels.w8a8_gemm import quantize_rows_int8
from tests.kernels.helpers import relative_error

REFERENCES = {torch.int8: quantize_rows_int8, FP8_DTYPE: quantize_rows_fp8}
CONFIG = RowConfig(8, 64, num_warps=2, num_stages=1)


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.double() * scales.double()[:, None]


@pytest.mark.parametrize(
    ("has_norm", "is_gated", "adds"), [(False, False, False), (True, False, True), (True, True, False)]
)
def test_one_row_with_norm_gate_and_residual(
    has_norm: bool, is_gated: bool, adds: bool, device: torch.device
) -> None:
    n, k = 37, 72
    x, residual = torch.randn(1, k, device=device) * 3, torch.randn(1, n, device=device)
    weight, scales = quantize_rows_int8(torch.randn(n * (1 + is_gated), k, device=device))
    bias = torch.randn(n * (1 + is_gated), device=device)
    norm = torch.randn(k, device=device) if has_norm else None
    h = x if norm is None else rms_norm(x, norm, 1e-6)
    expected = functional.linear(h, dequantized(weight, scales).float(), bias)
    expected = silu_mul(expected) if is_gated else expected
    expected = expected + residual if adds else expected
    out = one_row(x, weight, scales, bias, CONFIG, norm, 1e-6, residual if adds else None, is_gated)
    assert relative_error(out, expected) < 1e-5
    assert (out.data_ptr() == residual.data_ptr()) == adds


@pytest.mark.parametrize("dtype", REFERENCES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 128), (5, 37, 80), (33, 48, 128)])
@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_several_rows(
    dtype: torch.dtype, rows: int, n: int, k: int, split_k: int, has_bias: bool, device: torch.device
) -> None:
    codes, x_scales = REFERENCES[dtype](torch.randn(rows, k, device=device))
    weight, scales = REFERENCES[dtype](torch.randn(n, k, device=device))
    bias = torch.randn(n, device=device) if has_bias else None
    workspace = SmallMWorkspace(device)
    workspace.partials.fill_(float("nan"))
    expected = functional.linear(dequantized(codes, x_scales), dequantized(weight, scales))
    expected = expected if bias is None else expected + bias.double()
    config = RowsConfig(16, 32, 32, split_k, num_stages=2)
    for _ in range(2):  # the second launch finds the counters as the first left them
        out = several_rows(codes, x_scales, weight, scales, bias, torch.float32, workspace, config)
        assert relative_error(out, expected) < (1e-6 if dtype == torch.int8 else 1e-3)
        assert not workspace.counters.any()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight, scales = quantize_rows_int8(torch.randn(48, 64, device=device))
    codes, x_scales = quantize_rows_int8(torch.randn(2, 64, device=device))
    workspace = SmallMWorkspace(device, num_floats=16)
    with pytest.raises(ValueError, match="too many"):
        one_row(torch.randn(2, 64, device=device), weight, scales, None, CONFIG)
    with pytest.raises(ValueError, match="too small"):
        several_rows(codes, x_scales, weight, scales, None, torch.float32, workspace, RowsConfig(16, 32, 32, 2))
    with pytest.raises(ValueError, match="contiguous"):
        several_rows(
            codes[:, :48], x_scales, weight.T, scales, None, torch.float32, workspace, RowsConfig(16, 32, 32)
        )
