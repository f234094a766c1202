"""Dense maps of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.layers import linear
from engine.layers.linear import (
    dense_linear,
    fits_half,
    half_linear,
    half_of_bfloat16,
    half_weight,
    in_threes,
    onednn,
)
from kernels.cpu_features import has_bfloat16_gemms


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gemm", [onednn, half_of_bfloat16])
def test_a_packed_weight_is_the_same_map(gemm: Any, num_rows: int, has_bias: bool, cpu: None) -> None:
    weight = torch.randn(48, 32).bfloat16()
    bias = torch.randn(48).bfloat16() if has_bias else None
    x = torch.randn(num_rows, 32).bfloat16()
    packed = dense_linear(weight.clone(), bias)
    assert packed.gemm is gemm
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert packed(x).dtype == x.dtype
    torch.testing.assert_close(packed(x).double(), exact, atol=1e-2, rtol=1e-2)


@pytest.fixture
def cpu(gemm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has the GEMM, as this one may not be."""
    if gemm is onednn and not has_bfloat16_gemms():
        pytest.skip("no AVX-512")
    if gemm is half_of_bfloat16 and not fits_half(torch.zeros(1)):
        pytest.skip("torch was built without FBGEMM")
    monkeypatch.setattr(linear, "has_bfloat16_gemms", lambda: gemm is onednn)


def test_other_types_stay_plain() -> None:
    assert dense_linear(torch.randn(48, 32), None).is_plain


def test_a_weight_beyond_float16_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_bfloat16_gemms", lambda: False)
    assert dense_linear(torch.full((48, 32), 1e5).bfloat16(), None).is_plain


@pytest.mark.skipif(not fits_half(torch.zeros(1)), reason="torch was built without FBGEMM")
def test_a_float16_weight_is_multiplied_in_float32_and_rows_do_not_depend_on_company() -> None:
    weight, bias, x = torch.randn(50, 36).bfloat16(), torch.randn(50).bfloat16(), torch.randn(70, 36)
    layer = half_linear(weight, bias)
    assert torch.equal(half_weight(layer), weight.float())
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(layer(x).double(), exact, atol=1e-5, rtol=1e-5)
    for count in (1, 2, 3, 7, 17, 38):
        assert torch.equal(in_threes(layer, x[:count]), in_threes(layer, x)[:count])
        if has_bfloat16_gemms():
            assert torch.equal(layer(x[:count]), layer(x)[:count])
