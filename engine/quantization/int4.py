"""Weights in blocks of few bits: 4-bit ones in groups of 32 columns, and files that hold such blocks.

GEMMs take scales and offsets in bfloat16, so they are rounded to it here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.layers.weights import Part
from engine.quantization.quantized_rows import INT4_MIDDLE, QuantizedRows

GROUP_SIZE = 32


@runtime_checkable
class BlockSource(Protocol):
    """Weights of a file that may hold them in blocks of few bits. label: its kind, as a mode for users."""

    label: str
    kept_bits: Collection[int]
    """Weights of so many bits are taken as the numbers that `rows` stand for, whose scales are bfloat16's."""

    def has_most_in(self, bits: Collection[int]) -> bool:
        """Whether most matrices are in blocks of so many bits."""
        ...

    def is_packed(self, name: str) -> bool:
        """Whether the file holds the weight in blocks of `kept_bits`."""
        ...

    def rows(self, name: str, part: Part | None = None) -> QuantizedRows:
        """A weight of blocks, or a part of it."""
        ...


def quantize_int4(weight: Tensor) -> QuantizedRows:
    """weight (rows, columns), columns a multiple of 32: to the nearest of 16 steps between a group's extremes."""
    groups = weight.float().view(weight.shape[0], -1, GROUP_SIZE)
    low, high = groups.aminmax(dim=-1)
    scales = as_bfloat16(((high - low) / 15).clamp_min(1e-12))
    offsets = as_bfloat16(low + INT4_MIDDLE * scales)
    steps = (groups - offsets[..., None]) / scales[..., None]
    values = (steps.round() + INT4_MIDDLE).clamp(0, 15).to(torch.uint8).flatten(1)
    return QuantizedRows(values, scales, offsets, GROUP_SIZE)


def as_bfloat16(numbers: Tensor) -> Tensor:
    """float32 numbers rounded to those that bfloat16 has."""
    return numbers.bfloat16().float()
