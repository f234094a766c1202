from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.gpu.few_rows.gemm_configs import PreloadedConfig
from kernels.gpu.few_rows.preloaded_gemm import preloaded_linear
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, relative_error


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (80, 72)])
@pytest.mark.parametrize("config", [PreloadedConfig(32), PreloadedConfig(32, 2), PreloadedConfig(32, 4, 3)])
def test_partials_add_up_to_the_reference(
    rows: int, n: int, k: int, config: PreloadedConfig, device: torch.device
) -> None:
    x = torch.randn(rows, k + 8, device=device).to(HALF_DTYPE)[:, :k]
    weight = torch.randn(n, k, device=device).to(HALF_DTYPE)
    bias = torch.randn(n, device=device).to(HALF_DTYPE)
    for added in (None, bias):
        partials = preloaded_linear(x, weight, added, config)
        assert partials.shape == (-(-k // (config.chunk * config.num_chunks)), rows, n)
        expected = functional.linear(x.double(), weight.double(), None if added is None else added.double())
        assert relative_error(partials.double().sum(0), expected) < BFLOAT16_BOUND


@pytest.mark.parametrize("config", [PreloadedConfig(32, 2), PreloadedConfig(64, 2, 2)])
def test_a_row_is_the_same_in_any_company(config: PreloadedConfig, device: torch.device) -> None:
    x, weight = torch.randn(9, 128, device=device).to(HALF_DTYPE), torch.randn(96, 128, device=device).to(HALF_DTYPE)
    assert torch.equal(
        preloaded_linear(x, weight, None, config)[:, 3:4], preloaded_linear(x[3:4], weight, None, config)
    )  # fmt: skip


def test_a_chunk_is_no_wider_than_the_weight(device: torch.device) -> None:
    x, weight = torch.randn(3, 40, device=device), torch.randn(80, 40, device=device)
    out = preloaded_linear(x, weight, None, PreloadedConfig(512))
    assert relative_error(out.double().sum(0), functional.linear(x, weight)) < 1e-6


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight = torch.randn(65, 64, device=device), torch.randn(96, 64, device=device)
    with pytest.raises(ValueError, match="too many"):
        preloaded_linear(x, weight, None, PreloadedConfig(32))
    with pytest.raises(ValueError, match="contiguous"):
        preloaded_linear(x[:2, :48], weight[:, :48], None, PreloadedConfig(32))
    with pytest.raises(ValueError, match="multiple of 8"):
        preloaded_linear(x[:2, :60], weight[:, :60].contiguous(), None, PreloadedConfig(32))
