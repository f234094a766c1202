"""Weights in blocks of few bits: 4-bit quantization in groups of 32 columns, and the interface of files with blocks.

Scales and offsets are rounded to bfloat16 here, since GEMMs take them in it.
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
    """Weights of a file that may store blocks of few bits. label: their kind, as a quantization mode for users."""

    label: str
    kept_bits: Collection[int]
    """Weights of these bits are dequantized from their `rows`, whose scales are rounded to bfloat16."""

    def has_most_in(self, bits: Collection[int]) -> bool:
        """Whether most matrices are in blocks of these bits."""
        ...

    def is_packed(self, name: str) -> bool:
        """Whether the file stores the weight in blocks of `kept_bits`."""
        ...

    def rows(self, name: str, part: Part | None = None) -> QuantizedRows:
        """Return the rows of a weight in blocks, or of a part of it."""
        ...


def quantize_int4(weight: Tensor) -> QuantizedRows:
    """Quantize a weight (rows, columns), columns a multiple of 32, to 16 levels between each group's extremes."""
    groups = weight.float().view(weight.shape[0], -1, GROUP_SIZE)
    low, high = groups.aminmax(dim=-1)
    scales = as_bfloat16(((high - low) / 15).clamp_min(1e-12))
    offsets = as_bfloat16(low + INT4_MIDDLE * scales)
    steps = (groups - offsets[..., None]) / scales[..., None]
    values = (steps.round() + INT4_MIDDLE).clamp(0, 15).to(torch.uint8).flatten(1)
    return QuantizedRows(values, scales, offsets, GROUP_SIZE)


def as_bfloat16(numbers: Tensor) -> Tensor:
    """Round float32 numbers to bfloat16 precision."""
    return numbers.bfloat16().float()
