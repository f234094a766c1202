"""Linear layers of quantized weights on a CPU: which of torch's packed GEMMs takes which rows.

4 bits in groups        int4_linear, in groups of CPU_GROUP_SIZES
int8, a scale per row   int8_linear
others, and plain ones  int8_linear, quantized once more
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.linear import (
    COLUMN_MULTIPLE,
    Linear,
    int4_linear,
    int8_linear,
    quantize_int8,
)
from engine.quantization.quantized_rows import Made, QuantizedRows

CPU_GROUP_SIZES = (256, 128, 64, 32)  # of torch's 4-bit GEMM
INT4_ROW_MULTIPLE = 16  # of its packed layout


class CpuLinears:
    """Makes layers for x of one type. identity: tells devices apart that make different layers of the same rows."""

    quantizes_plain = True  # layers that a quantized checkpoint left plain become int8
    stacks_experts = False  # experts' layers need not be alike

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.identity = f"cpu, groups of {CPU_GROUP_SIZES}"

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None, is_stacked: bool = False) -> Made | None:
        """None for rows that no GEMM takes. rows.order is None. is_stacked: see `GpuLinears`."""
        num_rows, num_columns = rows.values.shape
        if rows.is_int8 and rows.has_row_scales and num_columns % COLUMN_MULTIPLE == 0:
            return int8_linear(rows.values, rows.scales[:, 0].to(self._dtype), bias), "int8"
        sizes = [size for size in CPU_GROUP_SIZES if rows.group_size % size == 0 and num_columns % size == 0]
        if not rows.is_int4 or not sizes or num_rows % INT4_ROW_MULTIPLE or num_columns % rows.group_size:
            return None
        smaller = rows.split_groups(sizes[0])
        scales, offsets = smaller.scales.bfloat16(), smaller.offsets_or_zeros().bfloat16()
        weight = QuantizedRows(rows.values, scales.float(), offsets.float(), sizes[0]).dequantize(self._dtype)
        return int4_linear(rows.values, scales, offsets, sizes[0], weight, bias), "int4"

    def of_plain(self, linear: Linear, quant_mode: str = "int8-weight", is_head: bool = False) -> Linear:
        """Quantize a plain layer to int8, or leave it as it is where the GEMM does not take it."""
        if linear.weight.shape[1] % COLUMN_MULTIPLE:
            return linear
        return int8_linear(*quantize_int8(linear.weight), linear.bias)
