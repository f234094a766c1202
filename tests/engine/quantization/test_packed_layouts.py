"""Unpacking of single maps: corners that whole checkpoints of tiny models do not reach."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.quantization.formats.compressed_tensors import PackQuantized
from engine.quantization.formats.fp8 import Fp8, Int8
from engine.quantization.formats.gptq import Gptq
from engine.quantization.formats.scheme import ROW, TENSOR, WeightScheme, unpack_words
from engine.quantization.quantized_rows import QuantizedRows, join_rows
from tests.engine.quantization.packed_files import pack_fp8, pack_gptq, pack_int8, pack_integers

GPTQ = Gptq(4, (1, 32), False, subtracts_one=True)


def rows_of(scheme: WeightScheme, tensors: dict[str, Tensor], shape: torch.Size) -> QuantizedRows:
    return scheme.rows(shape[0], shape[1], tensors.__getitem__, tensors)


def test_codes_come_from_the_low_bits_up() -> None:
    words = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)  # 0xFEDCBA98
    assert unpack_words(words, 4).tolist() == [list(range(16))]
    assert unpack_words(words, 8).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]


def test_zero_points_of_nought_borrow_from_their_neighbours() -> None:
    weight = torch.randn(16, 64)
    tensors, _ = pack_gptq(weight, symmetric=False, minus=0)
    tensors["qzeros"] = (
        torch.tensor([[0x80000F00, 0x00000000], [0x12345678, 0x00F00001]]).to(torch.uint32).view(torch.int32)
    )
    plain = rows_of(Gptq(4, (1, 32), False), tensors, weight.shape)
    tensors["qzeros"] = tensors["qzeros"] - 0x11111111
    less_one = rows_of(GPTQ, tensors, weight.shape)
    assert torch.equal(plain.dequantize(torch.float32), less_one.dequantize(torch.float32))


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_need_not_fill_words_or_groups(bits: int) -> None:
    weight = torch.randn(24, 68)
    padded = torch.nn.functional.pad(weight, (0, 28))
    tensors, rounded = pack_integers(padded, bits)
    tensors["weight_shape"] = torch.tensor([24, 68])
    tensors["weight_packed"] = tensors["weight_packed"][:, : -(-68 * bits // 32)]
    rows = rows_of(PackQuantized(bits, (1, 32)), tensors, weight.shape)
    assert torch.equal(rows.dequantize(torch.float32), rounded[:, :68])


def test_blocks_need_not_fill_the_matrix() -> None:
    weight = torch.randn(70, 50)
    tensors, rounded = pack_fp8(weight, (32, 16))
    rows = rows_of(Fp8(8, (32, 16)), tensors, weight.shape)
    assert torch.equal(rows.dequantize(torch.float32), rounded)


def test_zero_points_of_int8() -> None:
    weight = torch.rand(16, 32)
    tensors, _ = pack_int8(weight - 0.5)
    tensors["weight_zero_point"] = torch.randint(-50, 50, (16, 1)).to(torch.int8)
    rows = rows_of(Int8(8, ROW, is_symmetric=False), tensors, weight.shape)
    expected = (tensors["weight"].float() - tensors["weight_zero_point"].float()) * tensors["weight_scale"]
    torch.testing.assert_close(rows.dequantize(torch.float32), expected)
    assert not rows.has_row_scales


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_all_is_one_per_row(shape: tuple[int, ...]) -> None:
    weight = torch.randn(16, 32)
    tensors, rounded = pack_fp8(weight, (16, 32))
    tensors["weight_scale"] = tensors["weight_scale"].reshape(shape)
    scheme = Fp8(8, TENSOR)
    assert shape in scheme.tensors(16, 32, tensors)["weight_scale"].shapes
    rows = rows_of(scheme, tensors, weight.shape)
    assert rows.has_row_scales
    assert rows.scales.shape == (16, 1)
    assert torch.equal(rows.dequantize(torch.float32), rounded)


def test_sorted_groups_need_no_order() -> None:
    weight = torch.randn(16, 64)
    assert rows_of(GPTQ, pack_gptq(weight)[0], weight.shape).order is None
    tensors, rounded = pack_gptq(weight, act_order=True)
    rows = rows_of(GPTQ, tensors, weight.shape)
    assert rows.order is not None
    torch.testing.assert_close(rows.dequantize(torch.float32), rounded)


def test_groups_of_unequal_size_are_refused() -> None:
    weight = torch.randn(16, 64)
    tensors, _ = pack_gptq(weight)
    tensors["g_idx"][0] = 1
    with pytest.raises(ConfigError, match="groups of 32"):
        rows_of(GPTQ, tensors, weight.shape)


def test_rows_are_joined_only_when_alike() -> None:
    first, second = torch.randn(16, 64), torch.randn(32, 64)
    symmetric = rows_of(GPTQ, pack_gptq(first)[0], first.shape)
    shifted = rows_of(GPTQ, pack_gptq(second, symmetric=False)[0], second.shape)
    joined = join_rows([symmetric, shifted])
    assert joined is not None
    expected = torch.cat([symmetric.dequantize(torch.float32), shifted.dequantize(torch.float32)])
    assert torch.equal(joined.dequantize(torch.float32), expected)
    other_order = rows_of(GPTQ, pack_gptq(second, act_order=True)[0], second.shape)
    assert join_rows([symmetric, other_order]) is None
    same_order = rows_of(GPTQ, pack_gptq(first, act_order=True)[0], first.shape)
    assert join_rows([same_order, other_order]) is not None
    wider = rows_of(Gptq(4, (1, 64), False, subtracts_one=True), pack_gptq(first, group_size=64)[0], first.shape)
    assert join_rows([symmetric, wider]) is None
