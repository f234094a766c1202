from __future__ import annotations

import pytest
import torch

from kernels.elementwise import rms_norm, silu_mul
from kernels.gpu.few_rows import partials as gpu
from tests.kernels.helpers import BFLOAT16_BOUND, relative_error


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("n", [64, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partials_are_added_up_and_normed(num_splits: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    partials = torch.randn(num_splits, 5, n, device=device).to(dtype)
    residual, weight = torch.randn(5, n, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    total = residual.double() + partials.double().sum(0)
    out = gpu.add_rms_norm_of_partials(partials, residual, weight, 1e-6)
    bound = 1e-6 if dtype == torch.float32 else BFLOAT16_BOUND
    assert relative_error(residual, total) < bound
    assert relative_error(out, rms_norm(total.float(), weight.float(), 1e-6)) < 2 * bound


def test_norms_refuse_partials_that_are_not_contiguous(device: torch.device) -> None:
    partials, residual = torch.randn(2, 3, 64, device=device), torch.randn(2, 64, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        gpu.add_rms_norm_of_partials(partials[:, :2], residual, torch.ones(64, device=device), 1e-6)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("n", [96, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partials_are_added_up_and_gated(num_splits: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    partials = torch.randn(num_splits, 3, 2 * n, device=device).to(dtype)
    expected = silu_mul(partials.double().sum(0).float())
    assert relative_error(gpu.silu_mul_of_partials(partials), expected) < (
        2e-6 if dtype == torch.float32 else BFLOAT16_BOUND
    )


def test_gates_refuse_partials_that_are_not_contiguous(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        gpu.silu_mul_of_partials(torch.randn(2, 3, 64, device=device)[:, :2])
