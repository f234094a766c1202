"""Quantized linear layers on a CPU with torch's packed GEMMs, and which GEMM fits which rows.

4 bits in groups        int4_linear, in groups of CPU_GROUP_SIZES
int8, a scale per row   int8_linear
others, and plain ones  int8_linear, after requantization
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from engine.cpu_gemms.gemms import dense_linear
from engine.layers.linear import Linear
from engine.quantization.quantized_rows import Made, QuantizedRows

MAX_INT8_ROWS, MAX_INT4_ROWS = 4, 8  # rows of x for quantized GEMMs; more rows use the dense copy
COLUMN_MULTIPLE = 16  # for int8: with other sizes torch's GEMM reads past a row of x, where it may find NaN
CPU_GROUP_SIZES = (256, 128, 64, 32)  # of torch's 4-bit GEMM
INT4_ROW_MULTIPLE = 16  # of its packed layout
NUMBERS_AT_ONCE = 1 << 17  # numbers of a weight quantized at a time, so that temporaries stay in a cache


class CpuLinears:
    """Makes layers for x of one dtype. identity: tells apart devices that make different layers of equal rows."""

    quantizes_plain = True  # plain layers of a quantized checkpoint become int8
    stacks_experts = False  # experts' layers may differ
    block_bits: Collection[int] = (4,)  # of blocks with a GEMM

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.identity = f"cpu, groups of {CPU_GROUP_SIZES}"

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None, is_stacked: bool = False) -> Made | None:
        """Make a layer, or return None if no GEMM fits. rows.order is None. is_stacked: see `GpuLinears`."""
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
        """Quantize a plain layer to int8, or leave it plain if the GEMM does not support its size."""
        if linear.weight.shape[1] % COLUMN_MULTIPLE:
            return linear
        return int8_linear(*quantize_int8(linear.weight), linear.bias)


def int8(linear: Linear, x: Tensor) -> Tensor:
    assert linear.scales is not None, "int8 weights have them"
    y: Tensor = torch._weight_int8pack_mm(x, linear.weight, linear.scales)
    return y if linear.bias is None else y.add_(linear.bias)


def int8_linear(weight: Tensor, scales: Tensor, bias: Tensor | None) -> Linear:
    """Make a layer of int8 weights with one scale per output row, and of a dense copy for many rows of x.

    weight: int8 (out, in); scales: (out,) in the dtype of x. Both paths compute the same up to rounding, so a
    sequence may switch between them. torch's GEMM reads the weight once per 4 rows of x: [49152, 576] takes 1.0 ms at
    1 row, 2.0 at 4 and 3.9 at 8 on one core, the packed bfloat16 copy 1.8, 2.1 and 2.5.
    """
    linear = Linear(weight, bias, gemm=int8, scales=scales, max_rows=MAX_INT8_ROWS)
    linear.dense = dense_linear(int8_weight(linear), bias)
    return linear


def int8_weight(linear: Linear) -> Tensor:
    """Dequantize: weight * scales, (out, in) in the dtype of x."""
    assert linear.scales is not None, "int8 weights have them"
    return linear.weight.to(linear.scales.dtype).mul_(linear.scales[:, None])


def int4(linear: Linear, x: Tensor) -> Tensor:
    assert linear.scales is not None, "4-bit weights have them"
    y: Tensor = torch._weight_int4pack_mm_for_cpu(x, linear.weight, linear.group_size, linear.scales)
    return y if linear.bias is None else y.add_(linear.bias)


def int4_linear(
    values: Tensor, scales: Tensor, zeros: Tensor, group_size: int, weight: Tensor, bias: Tensor | None
) -> Linear:
    """Make a layer like `int8_linear`, of 4-bit weights with a scale and an offset per group of columns.

    values: (out, in), 0 to 15. scales, zeros: bfloat16 (out, in / group_size). weight: the same weight, dequantized.
    [3072, 576] at 1 row takes 33 us, int8 57; [49152, 576] 0.56 ms and 0.83.
    """
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 2)
    scales_and_zeros = torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous()
    dense = dense_linear(weight, bias)
    return Linear(
        packed, bias, gemm=int4, scales=scales_and_zeros, group_size=group_size, dense=dense, max_rows=MAX_INT4_ROWS
    )


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row to 255 levels: int8 [out, in], scales [out] in the dtype of `weight`."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=weight.dtype, device=weight.device)
    step = max(NUMBERS_AT_ONCE // weight.shape[1], 1)
    for first in range(0, len(weight), step):
        rows = weight[first : first + step]
        found = (rows.abs().amax(dim=1).float() / 127.0).clamp_min(1e-12).to(weight.dtype)
        values[first : first + step] = (rows.float() / found.float()[:, None]).round_().clamp_(-127, 127)
        scales[first : first + step] = found
    return values, scales
