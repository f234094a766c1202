"""The interface of a checkpoint format: its config, the tensors of a linear layer, and the rows made of them.

A format's file has `parse`, from `quantization_config` to a `CheckpointQuantization`, and a `WeightScheme` for each
way of storing a weight. Always w = (value - zero point) * scale. Schemes know no files: they read tensors by name.
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
# Tensors that mark a layer as quantized, even if others are missing.
MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
# Static scales of inputs. Here inputs are quantized with their own scales, if at all.
UNUSED = ("input_scale", "activation_scale", "input_zero_point", "output_scale", "input_global_scale")
Axis = tuple[int, int]
"""Dimension of the weight (N or K), and how many of its rows or columns an index covers; WHOLE: all of them."""
N, K = 0, 1
WHOLE = 0  # a block of all rows or all columns
TENSOR, ROW = (WHOLE, WHOLE), (1, WHOLE)


class NotSupportedError(Exception):
    """A format's config asks for something that is not supported."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Requirements on one stored tensor: one of `shapes`. axes: of its dimensions; empty: it is never cut."""

    types: tuple[str, ...]  # names of safetensors' types
    shapes: tuple[Shape, ...]
    axes: tuple[Axis, ...] = ()
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class WeightScheme(ABC):
    """How a linear layer's weight of n outputs and k inputs is stored.

    block: rows (outputs) and columns (inputs) that share a scale; WHOLE is all of them.
    is_symmetric: no zero points are stored. GPTQ and AWQ always store them.
    quantizes_inputs: the layer is made for 8-bit inputs, so its GEMM may quantize them.
    """

    bits: int
    block: tuple[int, int]
    is_symmetric: bool = True
    quantizes_inputs: bool = False

    @abstractmethod
    def tensors(self, n: int, k: int, found: Mapping[str, object]) -> dict[str, Stored]:
        """Return the tensors of a layer by the last part of their names. found: the stored names."""

    @abstractmethod
    def rows(self, n: int, k: int, read: Read, found: Mapping[str, object]) -> QuantizedRows:
        """Make rows of the tensors that `tensors` accepted. Raises ConfigError for invalid values."""

    @property
    def held_bits(self) -> int:
        """Bits of a weight in memory, on all devices."""
        return self.bits

    def num_groups(self, k: int) -> int:
        columns = self.block[1]
        return 1 if columns == WHOLE else -(-k // columns)

    def column_order(self, k: int, g_idx: Tensor) -> Tensor | None:
        """Return the columns sorted by group, or None if they are sorted. Raises ConfigError for unequal groups."""
        columns = self.block[1] or k
        expected = torch.arange(k, device=g_idx.device) // columns
        if bool((g_idx == -1).all()) or torch.equal(g_idx.long(), expected):  # -1 is a placeholder
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
        """Expand values per tensor, row or block to (n, groups)."""
        rows, groups = self.block[0], self.num_groups(k)
        if rows == WHOLE:
            return values.reshape(1, 1).expand(n, 1)
        return values.reshape(-1, groups).repeat_interleave(rows, dim=0)[:n]

    def integer_rows(
        self, k: int, values: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None, stores_middles: bool
    ) -> QuantizedRows:
        """Make rows of values uint8 (n, k) and zero points (n, groups) in the same range; 8-bit values become int8.

        stores_middles: if all zero points are the middle, that is a property of the whole weight, not by chance of
        this part.
        """
        middle = INT4_MIDDLE if self.bits == 4 else 128
        offsets: Tensor | None = (middle - zeros) * scales
        if stores_middles and not bool((zeros != middle).any()):
            offsets = None
        if self.bits == 8:
            values = (values ^ 128).view(torch.int8)  # equals subtracting 128
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
    """label: for logs and worker infos. A quantized layer has the first of the schemes that its tensors fit."""

    label: str
    schemes: tuple[WeightScheme, ...]


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 (rows, words) to uint8 (rows, words * 32 / bits), low bits first."""
    whole = (
        words.flatten().view(torch.uint8).view(words.shape[0], 4 * words.shape[1])
    )  # little endian: low bytes first
    if bits == 8:
        return whole
    return torch.stack([whole & 15, whole >> 4], dim=-1).flatten(1)


def num_words(count: int, bits: int) -> int:
    """Return the number of 32-bit words for `count` values."""
    return -(-count * bits // 32)


def bits_of(value: Any, known: tuple[int, ...], what: str) -> int:
    if type(value) is not int or value not in known:
        raise NotSupportedError(f"{what} with {value!r} bits")
    return value


def group_size_of(config: Mapping[str, Any]) -> int:
    """Return the columns that share a scale; -1 in the config is WHOLE."""
    value = config.get("group_size", config.get("q_group_size", 128))
    if type(value) is not int or not (value == -1 or value > 0):
        raise ConfigError(f"config.json: quantization_config.group_size must be -1 or positive, not {value!r}")
    return WHOLE if value == -1 else value


def block_of(value: Any) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"config.json: blocks of scales must be two positive sizes, not {value!r}")
