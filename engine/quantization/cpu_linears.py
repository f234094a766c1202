"""Linear layers of quantized weights on a CPU: torch's packed GEMMs, and which of these takes which rows.

4 bits in groups        int4_linear, in groups of CPU_GROUP_SIZES
int8, a scale per row   int8_linear
others, and plain ones  int8_linear, quantized once more
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from engine.cpu_gemms.gemms import dense_linear
from engine.layers.linear import Linear
from engine.quantization.quantized_rows import Made, QuantizedRows

MAX_INT8_ROWS, MAX_INT4_ROWS = 4, 8  # that quantized GEMMs of a CPU take; more read the dense copy
COLUMN_MULTIPLE = 16  # of int8: with others torch's GEMM reads beyond a row of x, and what it finds there may be NaN
CPU_GROUP_SIZES = (256, 128, 64, 32)  # of torch's 4-bit GEMM
INT4_ROW_MULTIPLE = 16  # of its packed layout
NUMBERS_AT_ONCE = 1 << 17  # of a weight that is quantized: what is made on the way stays in a cache


class CpuLinears:
    """Makes layers for x of one type. identity: tells devices apart that make different layers of the same rows."""

    quantizes_plain = True  # layers that a quantized checkpoint left plain become int8
    stacks_experts = False  # experts' layers need not be alike
    block_bits: Collection[int] = (4,)  # of blocks that have GEMMs

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


def int8(linear: Linear, x: Tensor) -> Tensor:
    assert linear.scales is not None, "int8 weights have them"
    y: Tensor = torch._weight_int8pack_mm(x, linear.weight, linear.scales)
    return y if linear.bias is None else y.add_(linear.bias)


def int8_linear(weight: Tensor, scales: Tensor, bias: Tensor | None) -> Linear:
    """int8 weights with one scale per output row for few rows of x, a dense copy of them for many.

    weight: int8 (out, in); scales: (out,) in the dtype of x. Both paths are the same function up to rounding, so a
    sequence may cross from one to the other. torch's GEMM works through the weight once per 4 rows of x: [49152, 576]
    takes 1.0 ms at 1 row, 2.0 at 4 and 3.9 at 8 on one core, the packed bfloat16 copy 1.8, 2.1 and 2.5.
    """
    linear = Linear(weight, bias, gemm=int8, scales=scales, max_rows=MAX_INT8_ROWS)
    linear.dense = dense_linear(int8_weight(linear), bias)
    return linear


def int8_weight(linear: Linear) -> Tensor:
    """(out, in) in the dtype of x: weight * scales."""
    assert linear.scales is not None, "int8 weights have them"
    return linear.weight.to(linear.scales.dtype).mul_(linear.scales[:, None])


def int4(linear: Linear, x: Tensor) -> Tensor:
    assert linear.scales is not None, "4-bit weights have them"
    y: Tensor = torch._weight_int4pack_mm_for_cpu(x, linear.weight, linear.group_size, linear.scales)
    return y if linear.bias is None else y.add_(linear.bias)


def int4_linear(
    values: Tensor, scales: Tensor, zeros: Tensor, group_size: int, weight: Tensor, bias: Tensor | None
) -> Linear:
    """Like `int8_linear`, with 4-bit weights that share a scale and an offset per group of columns.

    values: (out, in), 0 to 15. scales, zeros: bfloat16 (out, in / group_size). weight: the same numbers.
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
