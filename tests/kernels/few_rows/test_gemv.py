from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.elementwise import rms_norm, silu_mul
from kernels.gpu.few_rows.gemm_configs import GemvConfig
from kernels.gpu.few_rows.gemv import gemv
from tests.kernels.helpers import BFLOAT16_BOUND, relative_error

CONFIG = GemvConfig(8, 64, num_warps=4, num_stages=4)


@pytest.mark.parametrize(("n", "k"), [(48, 128), (37, 72)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference(n: int, k: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(1, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    bias = torch.randn(n, device=device).to(dtype) if has_bias else None
    expected = functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    bound = 1e-6 if dtype == torch.float32 else BFLOAT16_BOUND
    assert relative_error(gemv(x, weight, bias, CONFIG), expected) < bound


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_one_row_with_norm_gate_and_residual(
    has_norm: bool, is_gated: bool, adds: bool, device: torch.device
) -> None:
    n, k = 37, 72
    x, residual = torch.randn(1, k, device=device) * 3, torch.randn(1, n, device=device)
    weight = torch.randn(n * (1 + is_gated), k, device=device)
    norm = torch.randn(k, device=device) if has_norm else None
    h = x if norm is None else rms_norm(x, norm, 1e-6)
    expected = functional.linear(h, weight)
    expected = silu_mul(expected) if is_gated else expected
    expected = expected + residual if adds else expected
    out = gemv(x, weight, None, CONFIG, norm, 1e-6, residual if adds else None, is_gated)
    assert relative_error(out, expected) < 1e-5
    assert (out.data_ptr() == residual.data_ptr()) == adds


def test_a_gelu_gate(device: torch.device) -> None:
    x, weight = torch.randn(1, 72, device=device), torch.randn(2 * 37, 72, device=device)
    gate, up = functional.linear(x, weight).chunk(2, dim=-1)
    expected = functional.gelu(gate, approximate="tanh") * up
    assert relative_error(gemv(x, weight, None, CONFIG, is_gated=True, is_gelu=True), expected) < 2e-6


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight = torch.randn(48, 64, device=device)
    with pytest.raises(ValueError, match="too many"):
        gemv(torch.randn(2, 64, device=device), weight, None, CONFIG)
    with pytest.raises(ValueError, match="contiguous"):
        gemv(torch.randn(1, 48, device=device), weight.T, None, CONFIG)
