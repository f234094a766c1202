"""Parts of quantized weights: read, then dequantized, they are parts of the dequantized whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.layers.weights import Part
from engine.quantization.formats.awq import Awq
from engine.quantization.formats.compressed_tensors import PackQuantized
from engine.quantization.formats.fp8 import Fp8, Int8
from engine.quantization.formats.gptq import Gptq
from engine.quantization.formats.modelopt import Nvfp4
from engine.quantization.formats.scheme import WHOLE, WeightScheme
from engine.quantization.packed_checkpoint import unpack_part
from engine.quantization.quantized_rows import FILLED_GROUP, QuantizedRows
from tests.engine.quantization.packed_files import (
    Packed,
    pack_awq,
    pack_fp8,
    pack_gptq,
    pack_int8,
    pack_integers,
    pack_nvfp4,
)

N, K = 112, 192
GPTQ = Gptq(4, (1, 32), False, subtracts_one=True)
PACKED = PackQuantized(4, (1, 32))
LAYOUTS: dict[str, tuple[WeightScheme, Callable[[Tensor], Packed]]] = {
    "gptq": (GPTQ, lambda w: pack_gptq(w, symmetric=False)),
    "gptq, 8 bits": (replace(GPTQ, bits=8), lambda w: pack_gptq(w, 8, symmetric=False)),
    "gptq, one group": (replace(GPTQ, block=(1, WHOLE)), lambda w: pack_gptq(w, group_size=-1, symmetric=False)),
    "gptq, act-order": (GPTQ, lambda w: pack_gptq(w, act_order=True, symmetric=False)),
    "gptq, 8 bits, act-order": (
        replace(GPTQ, bits=8),
        lambda w: pack_gptq(w, 8, act_order=True, symmetric=False),
    ),
    "awq": (Awq(4, (1, 32), False), pack_awq),
    "awq, wide groups": (Awq(4, (1, 64), False), lambda w: pack_awq(w, 64)),
    "packed": (PACKED, pack_integers),
    "packed, asymmetric": (replace(PACKED, is_symmetric=False), lambda w: pack_integers(w, symmetric=False)),
    "packed, act-order": (PACKED, lambda w: pack_integers(w, act_order=True)),
    "packed, 8 bits a row": (PackQuantized(8, (1, WHOLE)), lambda w: pack_integers(w, 8, -1)),
    "int8": (Int8(8, (1, WHOLE)), pack_int8),
    "int8, one scale": (Int8(8, (WHOLE, WHOLE)), lambda w: pack_int8(w, per_row=False)),
    "fp8 in blocks": (Fp8(8, (48, 48)), lambda w: pack_fp8(w, (48, 48), "weight_scale_inv")),
    "fp8 in odd blocks": (Fp8(8, (40, 80)), lambda w: pack_fp8(w, (40, 80), "weight_scale_inv")),
    "nvfp4": (Nvfp4(4, (1, 16)), pack_nvfp4),
    "fp8, one scale": (
        Fp8(8, (WHOLE, WHOLE)),
        lambda w: pack_fp8(w, (N, K), "weight_scale", (1,)),
    ),
}


class Stored:
    """Tensors of a layer, and how much of them was read."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(3)
        self.scheme, pack = LAYOUTS[name]
        self.tensors, self.weight = pack(torch.randn(N, K))
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
    """Of 192 columns in groups of 64 a rank of two has one and a half."""
    for columns in (range(96), range(96, 192)):
        part = Stored("awq, wide groups").part(range(N), columns)
        assert (part.group_size, part.scales.shape) == (32, (N, 3))
    part = Stored("gptq, one group").part(range(N), range(96, 192))
    assert (part.group_size, part.scales.shape) == (96, (N, 1))


def test_groups_of_reordered_columns_are_filled_up() -> None:
    parts = [Stored("gptq, act-order").part(range(N), columns) for columns in (range(96), range(96, 192))]
    for part in parts:
        assert part.group_size == FILLED_GROUP
        assert part.order is not None
        assert part.values.shape[1] == len(part.order) == FILLED_GROUP * part.scales.shape[1]
        assert sorted(set(part.order.tolist())) == list(range(96))
        assert part.is_int4
