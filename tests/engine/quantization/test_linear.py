"""Dense maps of a CPU."""

from __future__ import annotations

import pytest
import torch

from engine.layers.linear import dense_linear, half_linear, half_weight, has_half_linear, onednn


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("num_rows", [1, 7, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_weight_is_the_same_map(num_rows: int, has_bias: bool) -> None:
    weight = torch.randn(48, 32).bfloat16()
    bias = torch.randn(48).bfloat16() if has_bias else None
    x = torch.randn(num_rows, 32).bfloat16()
    packed = dense_linear(weight.clone(), bias)
    assert packed.gemm is onednn
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(packed(x).double(), exact, atol=1e-2, rtol=1e-2)


def test_other_types_stay_plain() -> None:
    assert dense_linear(torch.randn(48, 32), None).is_plain


@pytest.mark.skipif(not has_half_linear(), reason="torch was built without FBGEMM")
def test_a_float16_weight_is_multiplied_in_float32_and_rows_do_not_depend_on_company() -> None:
    weight, bias, x = torch.randn(50, 36).bfloat16(), torch.randn(50).bfloat16(), torch.randn(70, 36)
    linear = half_linear(weight, bias)
    assert torch.equal(half_weight(linear), weight.float())
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(linear(x).double(), exact, atol=1e-5, rtol=1e-5)
    for count in (1, 3, 17):
        assert torch.equal(linear(x[:count]), linear(x)[:count])
