"""Linear layers on a GPU over weights that a checkpoint holds quantized: which GEMM takes which rows.

Stored values are taken as they are. Two exceptions: scales of e4m3 blocks become scales of rows, which quantizes
weights to e4m3 once more (2.6% of their size, as the first time), because matrix units apply one scale per row; and
what no GEMM takes becomes int8 (0.8%). `--quant-mode none` keeps the exact numbers in bfloat16. Experts' weights of
blocks keep their scales: grouped kernels multiply inputs of 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.quantization.gpu_linears import COLUMN_MULTIPLE, FP8, W8A8, W8A16, stored_layer, w4a16_layer
from engine.quantization.packed_linears import Made
from engine.quantization.quantized_rows import QuantizedRows
from kernels.gpu.gemm.split_k import SplitKWorkspace
from kernels.gpu.moe.expert_formats import fits
from kernels.quantization.w4a16_gemm import MAX_GROUP, pack_w4

FP8_CAPABILITY = (8, 9)  # of GPUs with matrix units for e4m3
MIN_GROUP = 16  # columns, of 4-bit groups; they are powers of two or multiples of one


class GpuLinearMaker:
    """A `LinearMaker` (`packed_linears`). Its layers run one after the other and share a workspace."""

    quantizes_plain = False

    def __init__(self, device: torch.device) -> None:
        self._workspace = SplitKWorkspace(device)
        self._has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
        self.identity = f"gpu, {'with' if self._has_fp8 else 'without'} e4m3"

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None) -> Made | None:
        """See LinearMaker."""
        num_columns = rows.values.shape[1]
        if num_columns % COLUMN_MULTIPLE:
            return None
        if rows.is_int4:
            if rows.group_size % MIN_GROUP or num_columns % rows.group_size:
                return None
            offsets = torch.zeros_like(rows.scales) if rows.offsets is None else rows.offsets
            return w4a16_layer(pack_w4(rows.values, rows.scales, offsets), bias, self._workspace), "int4"
        if rows.is_int8 and rows.has_row_scales:
            kind = W8A8 if rows.quantizes_inputs else W8A16
            return kind.linear(rows.values, rows.scales, bias, self._workspace), "int8"
        if rows.is_fp8 and rows.quantizes_inputs and self._has_fp8:
            if rows.has_row_scales:
                return FP8.linear(rows.values, rows.scales, bias, self._workspace), "e4m3"
            return FP8.of(Linear(rows.dequantize(torch.bfloat16), bias), self._workspace), "e4m3 of blocks"
        return None

    def of_expert(self, rows: QuantizedRows) -> Made | None:
        """See LinearMaker. Inputs stay in 16 bits, so weights of 8 bits may have scales of rows or of groups."""
        num_columns, group = rows.values.shape[1], rows.group_size
        if rows.is_int4:
            return self.of_rows(rows, None) if fits(num_columns, min(group & -group, MAX_GROUP), True) else None
        if num_columns % COLUMN_MULTIPLE or rows.offsets is not None or (rows.is_fp8 and not self._has_fp8):
            return None
        name = "e4m3" if rows.is_fp8 else "int8"
        if rows.has_row_scales:
            kind = FP8 if rows.is_fp8 else W8A8
            return kind.linear(rows.values, rows.scales, None, self._workspace), name
        if num_columns == group * rows.scales.shape[1] and fits(num_columns, group, False):
            return stored_layer(rows.values, rows.scales), f"{name} in groups"
        return None

    def int8(self, linear: Linear) -> Linear:
        """See LinearMaker."""
        if linear.weight.shape[1] % COLUMN_MULTIPLE:
            return linear
        return W8A16.of(linear, self._workspace)
