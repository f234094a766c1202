from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from kernels.elementwise import silu_mul
from kernels.gpu.few_rows.few_row_tuning import SKINNY_GATED
from kernels.gpu.few_rows.gated_gemm import gated_linear
from kernels.gpu.few_rows.gemm_configs import TileConfig
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, relative_error

CONFIG = TileConfig(16, 32, num_stages=2)


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (37, 72)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_equals_the_reference(
    rows: int, n: int, k: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(rows, k + 8, device=device).to(dtype)[:, :k]
    weight = torch.randn(2 * n, k, device=device).to(dtype)
    bias = torch.randn(2 * n, device=device).to(dtype) if has_bias else None
    wide_bias = bias.double() if bias is not None else None
    expected = silu_mul(functional.linear(x.double(), weight.double(), wide_bias))
    out = gated_linear(x, weight, bias, CONFIG)
    assert relative_error(out, expected) < (2e-6 if dtype == torch.float32 else 2 * BFLOAT16_BOUND)


def test_a_gelu_gate(device: torch.device) -> None:
    x, weight = torch.randn(3, 72, device=device), torch.randn(2 * 37, 72, device=device)
    gate, up = functional.linear(x, weight).chunk(2, dim=-1)
    expected = functional.gelu(gate, approximate="tanh") * up
    assert relative_error(gated_linear(x, weight, None, CONFIG, is_gelu=True), expected) < 2e-6


def test_a_row_is_the_same_in_any_company(device: torch.device) -> None:
    x, weight = torch.randn(9, 128, device=device).to(HALF_DTYPE), torch.randn(96, 128, device=device).to(HALF_DTYPE)
    assert torch.equal(
        gated_linear(x, weight, None, CONFIG)[3:4], gated_linear(x[3:4], weight, None, CONFIG)
    )  # fmt: skip


@pytest.mark.parametrize("rows", [2, 16, 64])
def test_what_is_chosen_fits(rows: int, device: torch.device) -> None:
    config = SKINNY_GATED.find(rows, 12288, 64)
    assert config is not None
    x, weight = torch.randn(rows, 64, device=device), torch.randn(2 * 128, 64, device=device)
    out = gated_linear(x, weight, None, replace(config, block_k=32, num_stages=1))
    assert relative_error(out, silu_mul(functional.linear(x, weight))) < 2e-6


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight = torch.randn(96, 64, device=device)
    with pytest.raises(ValueError, match="too many"):
        gated_linear(torch.randn(65, 64, device=device), weight, None, CONFIG)
    with pytest.raises(ValueError, match="contiguous"):
        gated_linear(torch.randn(2, 96, device=device), weight.T, None, CONFIG)
