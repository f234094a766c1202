"""What a format of quantized checkpoints is: its config, the tensors of a linear layer, and rows made of them.

A format's file has `parse`, from `quantization_config` to a `CheckpointQuantization`, and for each way in which it
stores a weight a `WeightScheme`. Everywhere w = (value - zero point) * scale. Knows nothing of files: shapes are
given, tensors are read by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.quantization.quantized_rows import INT4_MIDDLE, QuantizedRows

Shape = tuple[int, ...]
Read = Callable[[str], Tensor]
FLOATS = ("F16", "BF16", "F32")
INTS = ("I32", "I64")
# Tensors that show that a layer is quantized, even when others are missing.
MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
# Scales of inputs that were measured beforehand. Here inputs are quantized with scales of their own, if at all.
UNUSED = ("input_scale", "activation_scale", "input_zero_point", "output_scale", "input_global_scale")
Axis = tuple[int, int]
"""Dimension of the weight (N or K), and how many of its rows or columns an index stands for; WHOLE: all of them."""
N, K = 0, 1
WHOLE = 0  # a block that spans all rows or all columns
TENSOR, ROW = (WHOLE, WHOLE), (1, WHOLE)


class NotSupportedError(Exception):
    """What a format's config asks for and nothing here reads."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Requirements on one tensor of a layout: any of `shapes`. axes: of its dimensions; none: it is never cut."""

    types: tuple[str, ...]  # as safetensors names them
    shapes: tuple[Shape, ...]
    axes: tuple[Axis, ...] = ()
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class WeightScheme(ABC):
    """How one linear layer's weight, of n outputs and k inputs, is stored.

    block: rows (outputs) and columns (inputs) that share a scale; WHOLE is all of them.
    is_symmetric: no zero points are stored. GPTQ and AWQ always store them.
    quantizes_inputs: the layer was made for inputs of 8 bits, so its GEMM may quantize them.
    """

    bits: int
    block: tuple[int, int]
    is_symmetric: bool = True
    quantizes_inputs: bool = False

    @abstractmethod
    def tensors(self, n: int, k: int, found: Mapping[str, object]) -> dict[str, Stored]:
        """The tensors of a layer by the last part of their names. `found`: the names that are there."""

    @abstractmethod
    def rows(self, n: int, k: int, read: Read, found: Mapping[str, object]) -> QuantizedRows:
        """Make rows of what `tensors` accepted. Raises ConfigError for values that cannot be."""

    @property
    def held_bits(self) -> int:
        """Bits of a weight in memory, on any device."""
        return self.bits

    def num_groups(self, k: int) -> int:
        columns = self.block[1]
        return 1 if columns == WHOLE else -(-k // columns)

    def column_order(self, k: int, g_idx: Tensor) -> Tensor | None:
        """Columns sorted by group; None when they are already. Raises ConfigError for groups of other sizes."""
        columns = self.block[1] or k
        expected = torch.arange(k, device=g_idx.device) // columns
        if bool((g_idx == -1).all()) or torch.equal(g_idx.long(), expected):  # -1: a placeholder
            return None
        order = torch.argsort(g_idx, stable=True)
        if not torch.equal(g_idx[order].long(), expected):
            raise ConfigError(f"g_idx does not divide {k} inputs into groups of {columns}")
        return order

    def scale_shapes(self, n: int, k: int) -> tuple[Shape, ...]:
        rows, groups = self.block[0], self.num_groups(k)
        if rows == WHOLE:
            return (), (1,), (1, 1)
        blocks = -(-n // rows)
        return ((blocks, groups), (blocks,)) if groups == 1 else ((blocks, groups),)

    def per_row(self, n: int, k: int, values: Tensor) -> Tensor:
        """Values per tensor, row or block as (n, groups)."""
        rows, groups = self.block[0], self.num_groups(k)
        if rows == WHOLE:
            return values.reshape(1, 1).expand(n, 1)
        return values.reshape(-1, groups).repeat_interleave(rows, dim=0)[:n]

    def integer_rows(
        self, k: int, values: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None, stores_middles: bool
    ) -> QuantizedRows:
        """values uint8 (n, k) and zero points (n, groups) in the same range; int8 is made of 8-bit values.

        stores_middles: zero points in the middle are no chance of a part, but what all of the weight has.
        """
        middle = INT4_MIDDLE if self.bits == 4 else 128
        offsets: Tensor | None = (middle - zeros) * scales
        if stores_middles and not bool((zeros != middle).any()):
            offsets = None
        if self.bits == 8:
            values = (values ^ 128).view(torch.int8)  # the same as subtracting 128
        if order is not None:
            values = values[:, order]
        return self.made_rows(k, values, scales, offsets, order)

    def made_rows(
        self, k: int, values: Tensor, scales: Tensor, offsets: Tensor | None = None, order: Tensor | None = None
    ) -> QuantizedRows:
        if not bool(torch.isfinite(scales).all()):
            raise ConfigError("a scale is infinite or not a number")
        group_size = k if scales.shape[1] == 1 else self.block[1]
        scales = scales.contiguous()
        return QuantizedRows(values.contiguous(), scales, offsets, group_size, order, self.quantizes_inputs)


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """`label` names it in logs and worker infos. A quantized layer follows the first scheme that its tensors fit."""

    label: str
    schemes: tuple[WeightScheme, ...]


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 (rows, words) -> uint8 (rows, words * 32 / bits): values from the low bits up."""
    whole = (
        words.flatten().view(torch.uint8).view(words.shape[0], 4 * words.shape[1])
    )  # little endian: low bytes first
    if bits == 8:
        return whole
    return torch.stack([whole & 15, whole >> 4], dim=-1).flatten(1)


def num_words(count: int, bits: int) -> int:
    """Words of 32 bits that hold `count` values."""
    return -(-count * bits // 32)


def bits_of(value: Any, known: tuple[int, ...], what: str) -> int:
    if type(value) is not int or value not in known:
        raise NotSupportedError(f"{what} with {value!r} bits")
    return value


def group_size_of(config: Mapping[str, Any]) -> int:
    """Columns that share a scale; -1 in the config is WHOLE."""
    value = config.get("group_size", config.get("q_group_size", 128))
    if type(value) is not int or not (value == -1 or value > 0):
        raise ConfigError(f"config.json: quantization_config.group_size must be -1 or positive, not {value!r}")
    return WHOLE if value == -1 else value


def block_of(value: Any) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"config.json: blocks of scales must be two positive sizes, not {value!r}")
