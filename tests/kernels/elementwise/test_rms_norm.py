from __future__ import annotations

import pytest
import torch

from kernels.elementwise import rms_norm
from kernels.gpu.elementwise import rms_norm as gpu
from tests.kernels.helpers import BFLOAT16_BOUND, relative_error


@pytest.mark.parametrize(("rows", "n"), [(1, 64), (3, 576), (5, 3584)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(rows, n, device=device, dtype=dtype) * 3
    weight = torch.randn(n, device=device, dtype=dtype)
    bound = 1e-6 if dtype == torch.float32 else BFLOAT16_BOUND
    assert relative_error(gpu.rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6)) < bound


def test_rows_may_have_a_stride(device: torch.device) -> None:
    wide = torch.randn(4, 100, device=device)
    weight = torch.randn(48, device=device)
    assert relative_error(gpu.rms_norm(wide[:, :48], weight, 1e-5), rms_norm(wide[:, :48], weight, 1e-5)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_addition_equals_addition_then_norm(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(2, 6, 576, device=device).to(dtype)
    weight = torch.randn(576, device=device, dtype=dtype)
    total = residual + x
    out = gpu.add_rms_norm(x, residual, weight, 1e-6)
    if device.type == "cuda" or dtype == torch.float32:
        assert torch.equal(residual, total)
    assert relative_error(residual, total) < BFLOAT16_BOUND
    assert torch.equal(out, gpu.rms_norm(residual, weight, 1e-6))


def test_no_rows(device: torch.device) -> None:
    assert gpu.rms_norm(torch.empty(0, 64, device=device), torch.ones(64, device=device), 1e-6).shape == (0, 64)


def test_a_residual_with_gaps_is_refused(device: torch.device) -> None:
    wide = torch.randn(4, 100, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        gpu.add_rms_norm(wide[:, :48], wide[:, :48], torch.ones(48, device=device), 1e-6)


@pytest.mark.parametrize("n", [64, 100])
def test_norm_behind_the_embedding(n: int, device: torch.device) -> None:
    embedding, weight = torch.randn(11, n, device=device), torch.randn(n, device=device)
    token_ids = torch.tensor([3, 10, 3], device=device)
    residual, out = gpu.embed_rms_norm(token_ids, embedding, weight, 1e-6)
    assert torch.equal(residual, embedding[token_ids])
    assert torch.allclose(out, rms_norm(residual, weight, 1e-6))
