from __future__ import annotations

import pytest
import torch

from kernels.elementwise import rms_norm
from kernels.gpu.post_norms.post_norm import post_norm_add_norm
from tests.kernels.helpers import BFLOAT16_BOUND, relative_error


@pytest.mark.parametrize(("rows", "n"), [(1, 64), (3, 100), (0, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_norm_addition_and_norm(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """Weights are float32 for any type of x."""
    x = (torch.randn(rows, n + 8, device=device) * 3).to(dtype)[:, :n]
    residual = torch.randn(rows, n, device=device).to(dtype)
    post, weight = torch.randn(2, n, device=device)
    total = residual.float() + rms_norm(x.float(), post, 1e-6)
    out = post_norm_add_norm(x, post, residual, weight, 1e-6)
    assert (out.shape, out.dtype) == (residual.shape, dtype)
    if rows:
        bound = 1e-6 if dtype == torch.float32 else BFLOAT16_BOUND
        assert relative_error(residual, total) < bound
        assert relative_error(out, rms_norm(residual.float(), weight, 1e-6)) < bound


def test_a_residual_with_gaps_is_refused(device: torch.device) -> None:
    wide, weight = torch.randn(4, 100, device=device), torch.ones(48, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        post_norm_add_norm(wide[:, :48], weight, wide[:, :48], weight, 1e-6)
