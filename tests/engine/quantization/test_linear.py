"""Maps of a CPU: dense ones, and those of quantized rows: few and many inputs, orders, what torch does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cpu_gemms import gemms
from engine.cpu_gemms.gemms import dense_linear, fits_half, half_linear, half_of_bfloat16, in_threes, onednn
from engine.layers.linear import Linear
from engine.quantization.conversion import linear_of_rows
from engine.quantization.cpu_linears import CpuLinears, int4, int8
from engine.quantization.quantized_rows import FP8_DTYPE, QuantizedRows
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
    """Make a CPU with the GEMM, which this machine may lack."""
    if gemm is onednn and not has_bfloat16_gemms():
        pytest.skip("no AVX-512")
    if gemm is half_of_bfloat16 and not fits_half(torch.zeros(1)):
        pytest.skip("torch was built without FBGEMM")
    monkeypatch.setattr(gemms, "has_bfloat16_gemms", lambda: gemm is onednn)


def test_other_types_stay_plain() -> None:
    assert dense_linear(torch.randn(48, 32), None).is_plain


def test_a_weight_beyond_float16_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "has_bfloat16_gemms", lambda: False)
    assert dense_linear(torch.full((48, 32), 1e5).bfloat16(), None).is_plain


@pytest.mark.skipif(not fits_half(torch.zeros(1)), reason="torch was built without FBGEMM")
def test_a_float16_weight_is_multiplied_in_float32_and_rows_do_not_depend_on_company() -> None:
    weight, bias, x = torch.randn(50, 36).bfloat16(), torch.randn(50).bfloat16(), torch.randn(70, 36)
    layer = half_linear(weight, bias)
    assert torch.equal(torch.ops.quantized.linear_unpack_fp16(layer.weight)[0], weight.float())
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(layer(x).double(), exact, atol=1e-5, rtol=1e-5)
    for count in (1, 2, 3, 7, 17, 38):
        assert torch.equal(in_threes(layer, x[:count]), in_threes(layer, x)[:count])
        if has_bfloat16_gemms():
            assert torch.equal(layer(x[:count]), layer(x)[:count])


# -- quantized rows --------------------------------------------------------------------------------------------------


CPU = CpuLinears(torch.bfloat16)


def int4_rows(n: int, k: int, group_size: int, order: Tensor | None = None, shifted: bool = True) -> QuantizedRows:
    torch.manual_seed(n + k)
    scales = torch.rand(n, k // group_size) * 0.1 + 0.01
    offsets = scales * torch.randint(-8, 8, scales.shape) if shifted else None
    return QuantizedRows(torch.randint(0, 16, (n, k)).to(torch.uint8), scales, offsets, group_size, order)


def check(linear: Linear, rows: QuantizedRows, bias: Tensor | None, bound: float = 0.01) -> None:
    """Compare with the exact product, for few rows of x and many."""
    weight = rows.dequantize(torch.float32)
    for num_rows in (1, 3, 40):
        x = torch.randn(num_rows, weight.shape[1]).bfloat16()
        exact = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
        result = linear(x).float()
        assert float((result - exact).norm() / exact.norm()) < bound


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("k", "group_size", "held"), [(128, 32, 32), (256, 256, 256), (192, 192, 64), (96, 96, 32)])
def test_four_bits(k: int, group_size: int, held: int, has_bias: bool) -> None:
    bias = torch.randn(48).bfloat16() if has_bias else None
    rows = int4_rows(48, k, group_size)
    linear, kind = linear_of_rows([rows], bias, torch.bfloat16, CPU)
    assert linear.gemm is int4
    assert (linear.group_size, kind) == (held, "int4")
    check(linear, rows, bias)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        *(
            (int4_rows(n, k, group_size, torch.randperm(k)), "int8 of other groups")
            for n, k, group_size in ((40, 128, 32), (48, 128, 16), (48, 80, 80))
        ),
        (QuantizedRows(torch.randn(48, 64).to(FP8_DTYPE), torch.rand(48, 2), None, 32), "int8 of e4m3"),
    ],
    ids=["few rows", "small groups", "odd groups", "e4m3"],
)
def test_what_the_product_does_not_take_becomes_int8(rows: QuantizedRows, told: str) -> None:
    linear, kind = linear_of_rows([rows], None, torch.bfloat16, CPU)
    assert (linear.gemm, kind) == (int8, told)
    check(linear, rows, None, 0.02)


def test_int8_rows_are_taken_as_they_are() -> None:
    codes = torch.randint(-127, 128, (48, 64)).to(torch.int8)
    rows = QuantizedRows(codes, torch.rand(48, 1) * 0.01 + 0.001, None, 64)
    linear, kind = linear_of_rows([rows], None, torch.bfloat16, CPU)
    assert linear.weight is codes
    assert (linear.gemm, kind) == (int8, "int8")
    check(linear, rows, None)
