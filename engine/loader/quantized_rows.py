"""The one form in which every stored layout of quantized weights is held before a linear layer is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
INT4_MIDDLE = 8


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """w[i, order[j]] = (values[i, j] - middle) * scales[i, g] + offsets[i, g],  g = j // group_size.

    values (rows, columns): uint8 of 0 to 15 with middle 8; or int8 or e4m3 with middle 0. scales, offsets: float32
    (rows, groups). offsets None: zero. order (columns,): None: as they are. The last group may be short.
    quantizes_inputs: the GEMM may quantize its inputs to 8 bits.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    group_size: int
    order: Tensor | None = None
    quantizes_inputs: bool = False

    @property
    def is_int4(self) -> bool:
        return self.values.dtype == torch.uint8

    @property
    def is_int8(self) -> bool:
        return self.values.dtype == torch.int8

    @property
    def is_fp8(self) -> bool:
        return self.values.dtype == FP8_DTYPE

    @property
    def has_row_scales(self) -> bool:
        """Whether the rows have one scale each and no offsets."""
        return self.scales.shape[1] == 1 and self.offsets is None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """(rows, columns) in their own order, computed in float32."""
        weight = self.values.to(torch.float32)
        if self.is_int4:
            weight -= INT4_MIDDLE
        weight *= self._spread(self.scales)
        if self.offsets is not None:
            weight += self._spread(self.offsets)
        if self.order is None:
            return weight.to(dtype)
        plain = torch.empty_like(weight, dtype=dtype)
        plain[:, self.order] = weight.to(dtype)
        return plain

    def _spread(self, values: Tensor) -> Tensor:
        if values.shape[1] == 1:
            return values
        return values.repeat_interleave(self.group_size, dim=1)[:, : self.values.shape[1]]


def join_rows(parts: Sequence[QuantizedRows]) -> QuantizedRows | None:
    """The parts' rows under each other; None when they are quantized differently."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        same_order = part.order is first.order or (
            part.order is not None and first.order is not None and torch.equal(part.order, first.order)
        )
        if part.values.dtype != first.values.dtype or part.group_size != first.group_size or not same_order:
            return None
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat([torch.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts])
    values = torch.cat([part.values.view(torch.uint8) for part in parts])  # bytes, whatever they mean
    return QuantizedRows(
        values.view(first.values.dtype),
        torch.cat([part.scales for part in parts]),
        offsets,
        first.group_size,
        first.order,
        all(part.quantizes_inputs for part in parts),
    )
