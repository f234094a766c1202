"""Unpacking of single maps: parts are those of the dequantized whole, and corners that tiny models do not reach."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.layers.weights import Part
from engine.quantization.formats.compressed_tensors import PackQuantized
from engine.quantization.formats.fp8 import Fp8, Int8
from engine.quantization.formats.gptq import Gptq
from engine.quantization.formats.scheme import ROW, TENSOR, WeightScheme
from engine.quantization.packed_checkpoint import unpack_part
from engine.quantization.quantized_rows import FILLED_GROUP, QuantizedRows, join_rows
from engine.quantization.schemes import quantization_from_hf
from tests.engine.quantization.packed_files import (
    FORMATS,
    Format,
    gptq,
    pack_awq,
    pack_fp8,
    pack_gptq,
    pack_int8,
    pack_integers,
)

N, K = 112, 192
GPTQ = Gptq(4, (1, 32), False, subtracts_one=True)
LAYOUTS = {
    **FORMATS,
    "gptq-8bit-asymmetric-act-order": Format(
        gptq(8, desc_act=True, sym=False), lambda w: pack_gptq(w, 8, act_order=True, symmetric=False), "", ""
    ),
    "awq-wide-groups": Format({**FORMATS["awq"].config, "group_size": 64}, lambda w: pack_awq(w, 64), "", ""),
    "fp8-odd-blocks": Format(
        {**FORMATS["fp8-blocks"].config, "weight_block_size": [40, 80]},
        lambda w: pack_fp8(w, (40, 80), "weight_scale_inv"), "", "",
    ),
}  # fmt: skip


class Stored:
    """Holds the tensors of a layer, and counts the bytes that are read."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(3)
        quantization = quantization_from_hf({"quantization_config": LAYOUTS[name].config})
        assert quantization is not None
        self.scheme = quantization.schemes[0]
        self.tensors, self.weight = LAYOUTS[name].pack(torch.randn(N, K))
        self.num_read = 0

    def read(self, name: str, part: Part | None) -> Tensor:
        tensor = self.tensors[name]
        indices = tuple(slice(one.start, one.stop) for one in part or ())[: tensor.dim()]
        assert all(one.stop <= size for one, size in zip(part or (), tensor.shape, strict=False))
        found = tensor[indices]
        self.num_read += found.numel() * found.element_size()
        return found.clone()

    def part(self, rows: range, columns: range) -> QuantizedRows:
        return unpack_part(self.scheme, N, K, self.read, self.tensors, (rows, columns))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_part_is_that_of_the_dequantized_weight(name: str) -> None:
    stored = Stored(name)
    for rows in (range(N), range(56), range(56, 112), range(84, 112), range(3, 50), range(100, 120), range(116, 120)):
        for columns in (range(K), range(96), range(96, 192), range(48, 96), range(144, 192), range(24, 48)):
            expected = torch.zeros(len(rows), len(columns))
            inside = stored.weight[rows.start : rows.stop, columns.start : columns.stop]
            expected[: len(inside)] = inside
            part = stored.part(rows, columns)
            assert torch.equal(part.dequantize(torch.float32), expected), (rows, columns)
            assert part.values.shape[1] % part.group_size == 0 or columns.stop == K


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "order" not in name])
def test_what_is_read_is_little_more_than_the_part(name: str) -> None:
    stored = Stored(name)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stored.tensors.values())
    stored.part(range(56, 112), range(K))
    assert stored.num_read < 0.7 * num_bytes
    stored.num_read = 0
    stored.part(range(N), range(96, K))
    assert stored.num_read < 0.7 * num_bytes


def test_groups_of_a_rank_are_as_wide_as_they_can_be() -> None:
    """With 192 columns in groups of 64, each of two ranks has one and a half groups."""
    for columns in (range(96), range(96, 192)):
        part = Stored("awq-wide-groups").part(range(N), columns)
        assert (part.group_size, part.scales.shape) == (32, (N, 3))
    part = Stored("gptq-one-group").part(range(N), range(96, 192))
    assert (part.group_size, part.scales.shape) == (96, (N, 1))


def test_groups_of_reordered_columns_are_filled_up() -> None:
    parts = [Stored("gptq-act-order").part(range(N), columns) for columns in (range(96), range(96, 192))]
    for part in parts:
        assert part.group_size == FILLED_GROUP
        assert part.order is not None
        assert part.values.shape[1] == len(part.order) == FILLED_GROUP * part.scales.shape[1]
        assert sorted(set(part.order.tolist())) == list(range(96))
        assert part.is_int4


# -- corners ---------------------------------------------------------------------------------------------------------


def rows_of(scheme: WeightScheme, tensors: dict[str, Tensor], shape: torch.Size) -> QuantizedRows:
    return scheme.rows(shape[0], shape[1], tensors.__getitem__, tensors)


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
