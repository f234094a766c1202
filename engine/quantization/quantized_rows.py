"""The common form of all layouts of quantized weights, from which linear layers are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear import Linear

FP8_DTYPE = torch.float8_e4m3fn
INT4_MIDDLE = 8
FILLED_GROUP = 32  # columns of padded groups: the smallest that GEMMs of both devices support
FILLED_MULTIPLE = 128  # columns of all padded groups: what 4-bit GEMMs on a GPU read at once
Made = tuple[Linear, str]  # a layer made of rows, and its kind for logs


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """w[i, order[j]] = (values[i, j] - middle) * scales[i, g] + offsets[i, g],  g = j // group_size.

    values (rows, columns): uint8 of `bits`, 2 to 6, with middle 2^(bits - 1); or int8 or e4m3 with middle 0. scales,
    offsets: float32 (rows, groups). offsets None: zero. order (columns,): None: the identity; an input may occur
    several times, if all its weights but one are zero. The last group may be short. quantizes_inputs: the GEMM may
    quantize its inputs to 8 bits.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    group_size: int
    order: Tensor | None = None
    quantizes_inputs: bool = False
    bits: int = 4

    @property
    def is_int4(self) -> bool:
        return self.is_packed and self.bits == 4

    @property
    def is_packed(self) -> bool:
        """Whether values have fewer than 8 bits."""
        return self.values.dtype == torch.uint8

    @property
    def middle(self) -> int:
        return 1 << self.bits - 1 if self.is_packed else 0

    @property
    def is_int8(self) -> bool:
        return self.values.dtype == torch.int8

    @property
    def is_fp8(self) -> bool:
        return self.values.dtype == FP8_DTYPE

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has one scale, and no offset."""
        return self.scales.shape[1] == 1 and self.offsets is None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Dequantize to (rows, columns) in the original column order, computed in float32."""
        (num_rows, num_columns), num_groups = self.values.shape, self.scales.shape[1]
        width = self.group_size if num_groups > 1 else num_columns
        weight = self.values.to(torch.float32)
        if num_groups * width > num_columns:  # a short last group
            weight = functional.pad(weight, (0, num_groups * width - num_columns))
        groups = weight.view(num_rows, num_groups, width)
        groups -= self.middle
        groups *= self.scales[..., None]
        if self.offsets is not None:
            groups += self.offsets[..., None]
        weight = weight[:, :num_columns]
        if self.order is None:
            return weight.to(dtype).contiguous()
        plain = weight.new_zeros(num_rows, int(self.order.max()) + 1)
        return plain.index_add_(1, self.order, weight).to(dtype)

    def offsets_or_zeros(self) -> Tensor:
        return torch.zeros_like(self.scales) if self.offsets is None else self.offsets

    def map(self, choose: Callable[[Tensor], Tensor]) -> QuantizedRows:
        """Apply `choose` to values, scales and offsets."""
        values = choose(self.values.view(torch.uint8)).view(self.values.dtype)  # as bytes, for any dtype
        offsets = None if self.offsets is None else choose(self.offsets)
        return replace(self, values=values, scales=choose(self.scales), offsets=offsets)

    def take_rows(self, rows: Tensor) -> QuantizedRows:
        """Select rows, in the given order."""
        return self.map(lambda part: part[rows])

    def cut_rows(self, rows: range) -> QuantizedRows:
        """Select rows, with zeros for those beyond the last."""
        if rows == range(self.values.shape[0]):
            return self
        start, stop, count = rows.start, min(rows.stop, self.values.shape[0]), len(rows)
        return self.map(lambda part: functional.pad(part[start:stop], (0, 0, 0, count - max(stop - start, 0))))

    def cut_columns(self, columns: range) -> QuantizedRows:
        """Select inputs. Groups become smaller if the inputs do not start or end at a group."""
        if columns == range(self.num_inputs):
            return self
        if self.order is not None:
            return self._cut_reordered(self.order, columns)
        values = self.values[:, columns.start : columns.stop].contiguous()
        if self.scales.shape[1] == 1:
            return replace(self, values=values, group_size=len(columns))
        smaller = self.split_groups(math.gcd(columns.start, len(columns)))
        groups = slice(columns.start // smaller.group_size, columns.stop // smaller.group_size)
        offsets = None if smaller.offsets is None else smaller.offsets[:, groups].contiguous()
        return replace(smaller, values=values, scales=smaller.scales[:, groups].contiguous(), offsets=offsets)

    def split_groups(self, size: int) -> QuantizedRows:
        """Split groups of columns so that none crosses a multiple of `size` columns."""
        smaller = math.gcd(self.group_size, size)
        times, count = self.group_size // smaller, -(-self.values.shape[1] // smaller)
        if times == 1 or (self.scales.shape[1] == 1 and not self.is_packed):  # 8-bit GEMMs take scales of rows
            return self

        def spread(values: Tensor) -> Tensor:
            return values.repeat_interleave(times, dim=1)[:, :count]

        offsets = None if self.offsets is None else spread(self.offsets)
        return replace(self, scales=spread(self.scales), offsets=offsets, group_size=smaller)

    @property
    def num_inputs(self) -> int:
        return self.values.shape[1] if self.order is None else int(self.order.max()) + 1

    def _cut_reordered(self, order: Tensor, columns: range) -> QuantizedRows:
        """Select inputs of reordered columns, sorted by group. Groups are padded with weights of zero."""
        indices = ((order >= columns.start) & (order < columns.stop)).nonzero()[:, 0]
        groups = indices // self.group_size
        counts = torch.bincount(groups, minlength=self.scales.shape[1])
        filled = -(-counts // FILLED_GROUP) * FILLED_GROUP
        filled[-1] += -int(filled.sum()) % FILLED_MULTIPLE
        in_group = torch.arange(len(indices), device=order.device) - (counts.cumsum(0) - counts)[groups]
        target = (filled.cumsum(0) - filled)[groups] + in_group
        of_filled = torch.arange(len(counts), device=order.device).repeat_interleave(filled // FILLED_GROUP)
        scales = self.scales[:, of_filled]
        offsets = None if self.offsets is None else self.offsets[:, of_filled]
        values = self._zeros(scales, offsets).repeat_interleave(FILLED_GROUP, dim=1)
        values[:, target] = self.values[:, indices]
        cut = torch.zeros(values.shape[1], dtype=order.dtype, device=order.device)
        cut[target] = order[indices] - columns.start
        return QuantizedRows(values, scales, offsets, FILLED_GROUP, cut, self.quantizes_inputs, self.bits)

    def _zeros(self, scales: Tensor, offsets: Tensor | None) -> Tensor:
        """Return each group's value for a weight of zero: its zero point."""
        if offsets is None:
            return torch.full(scales.shape, self.middle, dtype=self.values.dtype, device=scales.device)
        zeros = self.middle - (offsets / torch.where(scales == 0, 1.0, scales)).round()
        low, high = (0, 2 * self.middle - 1) if self.is_packed else (-128, 127)
        return zeros.clamp(low, high).to(self.values.dtype if self.is_packed else torch.int8)


def join_rows(parts: Sequence[QuantizedRows]) -> QuantizedRows | None:
    """Concatenate the rows of all parts, or return None if they are quantized differently."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        same_order = part.order is first.order or (
            part.order is not None and first.order is not None and torch.equal(part.order, first.order)
        )
        if (part.values.dtype, part.bits, part.group_size) != (first.values.dtype, first.bits, first.group_size):
            return None
        if not same_order:
            return None
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat([part.offsets_or_zeros() for part in parts])
    values = torch.cat([part.values.view(torch.uint8) for part in parts])  # as bytes, for any dtype
    return QuantizedRows(
        values.view(first.values.dtype),
        torch.cat([part.scales for part in parts]),
        offsets,
        first.group_size,
        first.order,
        all(part.quantizes_inputs for part in parts),
        first.bits,
    )
