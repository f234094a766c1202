from __future__ import annotations

import pytest
import torch

from kernels.gpu.partials import add_rms_norm_of_partials, silu_mul_of_partials
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from tests.kernels.helpers import BFLOAT16_BOUND, relative_error


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("n", [64, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_the_reference(num_splits: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    partials = torch.randn(num_splits, 5, n, device=device).to(dtype)
    residual, weight = torch.randn(5, n, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    total = residual.double() + partials.double().sum(0)
    out = add_rms_norm_of_partials(partials, residual, weight, 1e-6)
    bound = 1e-6 if dtype == torch.float32 else BFLOAT16_BOUND
    assert relative_error(residual, total) < bound
    assert relative_error(out, rms_norm(total.float(), weight.float(), 1e-6)) < 2 * bound


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("n", [96, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_equals_the_reference(num_splits: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    partials = torch.randn(num_splits, 3, 2 * n, device=device).to(dtype)
    expected = silu_mul(partials.double().sum(0).float())
    assert relative_error(silu_mul_of_partials(partials), expected) < (
        2e-6 if dtype == torch.float32 else BFLOAT16_BOUND
    )


def test_what_is_not_contiguous_is_refused(device: torch.device) -> None:
    partials = torch.randn(2, 3, 64, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        silu_mul_of_partials(partials[:, :2])
    with pytest.raises(ValueError, match="contiguous"):
        add_rms_norm_of_partials(
            partials[:, :2], torch.randn(2, 64, device=device), torch.ones(64, device=device), 1e-6
        )
