from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from kernels.gpu.small_m_gemm import SmallMConfig, choose, gemv, small_m_linear
from kernels.gpu.split_k import SplitKWorkspace
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, relative_error

CONFIGS = [SmallMConfig(16, 32, split_k, 4, 2) for split_k in (1, 3)]
GEMV = SmallMConfig(8, 64, is_gemv=True)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (37, 72)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_equals_the_reference(
    config: SmallMConfig, rows: int, n: int, k: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    check(config, rows, n, k, has_bias, dtype, device)


@pytest.mark.parametrize(("n", "k"), [(48, 128), (37, 72)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_without_matrix_units(
    n: int, k: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    check(GEMV, 1, n, k, has_bias, dtype, device)


def check(
    config: SmallMConfig, rows: int, n: int, k: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(rows, k + 8, device=device).to(dtype)[:, :k]
    weight = torch.randn(n, k, device=device).to(dtype)
    bias = torch.randn(n, device=device).to(dtype) if has_bias else None
    workspace = SplitKWorkspace(device)
    workspace.partials.fill_(float("nan"))
    expected = functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    for _ in range(2):  # the second launch finds the counters as the first left them
        out = small_m_linear(x, weight, bias, workspace, config)
        assert relative_error(out, expected) < (1e-6 if dtype == torch.float32 else BFLOAT16_BOUND)
        assert not workspace.counters.any()


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
    out = gemv(x, weight, None, GEMV, norm, 1e-6, residual if adds else None, is_gated)
    assert relative_error(out, expected) < 1e-5
    assert (out.data_ptr() == residual.data_ptr()) == adds


def test_a_row_is_the_same_in_any_company(device: torch.device) -> None:
    x, weight = torch.randn(9, 128, device=device).to(HALF_DTYPE), torch.randn(48, 128, device=device).to(HALF_DTYPE)
    workspace = SplitKWorkspace(device)
    together = small_m_linear(x, weight, None, workspace, CONFIGS[1])
    assert torch.equal(together[3:4], small_m_linear(x[3:4], weight, None, workspace, CONFIGS[1]))


@pytest.mark.parametrize("rows", [1, 2, 32])
@pytest.mark.parametrize(("n", "k"), [(256, 512), (512, 256), (4608, 64)])
def test_what_is_chosen_fits(rows: int, n: int, k: int, device: torch.device) -> None:
    config = choose(rows, n, k)
    assert config is not None
    x, weight = torch.randn(rows, k, device=device), torch.randn(n, k, device=device)
    out = small_m_linear(x, weight, None, SplitKWorkspace(device), replace(config, num_stages=1))
    assert relative_error(out, functional.linear(x, weight)) < 1e-6


def test_many_rows_are_left_to_cublas() -> None:
    assert choose(64, 4608, 3584) is None


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight = torch.randn(48, 64, device=device)
    workspace = SplitKWorkspace(device, num_floats=16)
    with pytest.raises(ValueError, match="too many"):
        small_m_linear(torch.randn(65, 64, device=device), weight, None, workspace, CONFIGS[0])
    with pytest.raises(ValueError, match="too many"):
        small_m_linear(torch.randn(2, 64, device=device), weight, None, workspace, GEMV)
    with pytest.raises(ValueError, match="too small"):
        small_m_linear(torch.randn(2, 64, device=device), weight, None, workspace, CONFIGS[1])
    with pytest.raises(ValueError, match="contiguous"):
        small_m_linear(torch.randn(2, 48, device=device), weight.T, None, workspace, CONFIGS[0])
