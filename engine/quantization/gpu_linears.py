"""Quantized linear layers on a GPU: their GEMMs, and which of them fits which rows or plain layers.

    W8A8     int8 weights with one scale per row, x quantized to int8 per token
    W8A16    the same, x quantized to 16 bits, as two int8 planes
    FP8      e4m3 weights and x
    w4a16    4-bit weights in groups, x in 16 bits
    packed   GGUF blocks of 2, 3, 5 or 6 bits, x in 16 bits
    stored   one byte a weight with a scale per group of columns, or e2m1 weights with group exponents: for kernels
             of experts; a plain layer in this form is dequantized at every use

Stored values are kept, with two exceptions. Scales of e4m3 blocks become scales of rows, since tensor cores apply one
scale per row; this requantizes weights to e4m3 (error 2.6% of their size, as the first time). Weights without a GEMM
become int8 (0.8%). `--quant-mode none` keeps the exact numbers in bfloat16. Experts' weights in blocks keep their
scales, since grouped kernels multiply 16-bit inputs.

All take x (rows, in) in bfloat16 and can be captured in a CUDA graph. Knows no models and no files. GEMMs:
`kernels.gpu.quantization.{quantized_gemm,packed_linear}`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear import Linear
from engine.quantization.quantized_rows import Made, QuantizedRows
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.moe.expert_formats import WORDS, columns_of, fits
from kernels.gpu.quantization.packed_linear import packed_linear, w4a16_linear
from kernels.gpu.quantization.quantize import quantize_rows, quantize_with_maxima, silu_mul_quantize
from kernels.gpu.quantization.quantized_gemm import dequantize, quantized_gemm
from kernels.gpu.quantization.quantized_tuning import MAX_TWO_PLANE_ROWS, SLICED_K_GATED
from kernels.gpu.quantization.sliced_k_gemm import sliced_k_gated_gemm
from kernels.quantization.mxfp4 import dequantize_mxfp4
from kernels.quantization.packed_weights import PackedWeight, can_pack, pack_weight
from kernels.quantization.quantized_gemm import FP8_DTYPE
from kernels.quantization.w4a16_gemm import MAX_GROUP, PackedW4, dequantize_w4, pack_w4

COLUMN_MULTIPLE = 16  # of inputs of 8-bit GEMMs; other layers stay plain
FP8_CAPABILITY = (8, 9)  # GPUs with e4m3 tensor cores
MIN_GROUP = 16  # columns of 4-bit groups, which are powers of two or multiples of one
QuantizedInput = tuple[Tensor, Tensor]  # values (num_planes * rows, in), float32 scales (rows,)


@dataclass(frozen=True, slots=True)
class EightBit:
    """GEMM of 8-bit weights with a scale per row. Inputs are quantized to the weights' type, or to two planes of it,
    with the same result for any number of rows, up to `max_quantized_rows`.

    Two int8 planes add less error to a row than bfloat16, as long as its largest element is below 187 times its root
    mean square; at most it is sqrt(K) times (docs/decisions/quantized-linear-layers.md). With many rows dequantizing
    the weight to the dtype of x is faster.
    """

    dtype: torch.dtype
    num_planes: int = 1
    max_quantized_rows: int = sys.maxsize

    def linear(self, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SplitKWorkspace) -> Linear:
        """Make a layer. weight: (out, in) of `dtype`, `in` a multiple of 16; scales: (out,), or one for all."""
        if weight.dtype != self.dtype or weight.shape[1] % COLUMN_MULTIPLE:
            raise ValueError(f"{self.dtype} and a multiple of {COLUMN_MULTIPLE} columns are needed: {weight.shape}")
        scales = scales.float().flatten().expand(weight.shape[0]).contiguous()
        return Linear(weight.contiguous(), bias, gemm=self, scales=scales, workspace=workspace)

    def of(self, linear: Linear, workspace: SplitKWorkspace) -> Linear:
        """Quantize a plain layer."""
        return self.linear(*quantize_rows(linear.weight, self.dtype), linear.bias, workspace)

    def __call__(self, layer: Linear, x: Tensor) -> Tensor:
        if x.shape[0] > self.max_quantized_rows:
            return functional.linear(x, dequantize(layer.weight, scales_of(layer), x.dtype), layer.bias)
        return self.multiply(layer, *quantize_rows(x, self.dtype, self.num_planes), x.dtype)

    def multiply(self, layer: Linear, values: Tensor, x_scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply a `QuantizedInput`, see `kernels.gpu.quantization.quantize`. Returns (rows, out) in `dtype`."""
        return quantized_gemm(values, x_scales, layer.weight, scales_of(layer), layer.bias, dtype, layer.workspace)

    def multiply_gated(self, layer: Linear, values: Tensor, x_scales: Tensor, dtype: torch.dtype) -> QuantizedInput:
        """Multiply by gate and up, concatenated, and quantize silu(gate) * up."""
        n, k = layer.weight.shape
        config = SLICED_K_GATED.find(values.shape[0], n // 2, k)
        if config is None:
            return silu_mul_quantize(self.multiply(layer, values, x_scales, dtype), self.dtype, self.num_planes)
        inner, maxima = sliced_k_gated_gemm(
            values, x_scales, layer.weight, scales_of(layer), layer.bias, dtype, config
        )
        return quantize_with_maxima(inner, maxima, self.dtype, self.num_planes)


W8A8 = EightBit(torch.int8)
W8A16 = EightBit(torch.int8, 2, MAX_TWO_PLANE_ROWS)
FP8 = EightBit(FP8_DTYPE)
MODES = {"fp8": (FP8, W8A8), "w8a8": (W8A8, W8A8)}  # second: the head's, where int8 keeps more greedy tokens


def w4a16(layer: Linear, x: Tensor) -> Tensor:
    return w4a16_linear(x, packed_of(layer), layer.bias, layer.workspace)


def w4a16_layer(packed: PackedW4, bias: Tensor | None, workspace: SplitKWorkspace) -> Linear:
    """Make a layer of 4-bit weights in groups, packed by `kernels.quantization.w4a16_gemm.pack_w4`."""
    return Linear(
        packed.words, bias, gemm=w4a16, scales=packed.scales_and_zeros, group_size=packed.group_size,
        num_columns=packed.num_columns, workspace=workspace,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedGemm:
    """GEMM of blocks of 2, 3, 5 or 6 bits."""

    packed: PackedWeight

    def __call__(self, layer: Linear, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, layer.bias, layer.workspace)


def packed_layer(packed: PackedWeight, bias: Tensor | None, workspace: SplitKWorkspace) -> Linear:
    """Make a layer of 2, 3, 5 or 6 bits, packed by `kernels.quantization.packed_weights.pack_weight`."""
    return Linear(
        packed.words, bias, gemm=PackedGemm(packed), scales=packed.pairs, num_columns=packed.num_columns,
        workspace=workspace,
    )  # fmt: skip


def packed_of(layer: Linear) -> PackedW4:
    """Return the weight of a `w4a16_layer`."""
    return PackedW4(layer.weight, scales_of(layer), layer.group_size)


def scales_of(layer: Linear) -> Tensor:
    assert layer.scales is not None, "quantized weights have them"
    return layer.scales


def stored(layer: Linear, x: Tensor) -> Tensor:
    return functional.linear(x, dequantized(layer, x.dtype), layer.bias)


def stored_layer(weight: Tensor, scales: Tensor, bias: Tensor | None = None, num_columns: int = 0) -> Linear:
    """Make a layer of weight (out, ...) and scales (out, groups), see `kernels/gpu/moe/expert_formats.py`.

    num_columns: without padding; 0: all.
    """
    columns = columns_of(weight)
    return Linear(
        weight, bias, gemm=stored, scales=scales, group_size=columns // scales.shape[1],
        num_columns=num_columns or columns,
    )  # fmt: skip


def dequantized(layer: Linear, dtype: torch.dtype) -> Tensor:
    """Dequantize weights of any form to (out, in), computed in float32."""
    weight, scales = layer.weight, scales_of(layer)
    if scales.dtype == torch.uint8:
        return dequantize_mxfp4(weight, scales, dtype)[:, : layer.num_columns]
    if weight.dtype == WORDS:
        return dequantize_w4(packed_of(layer), dtype)
    of_groups = scales.view(len(scales), -1, 1)
    return (weight.float().view(*of_groups.shape[:2], -1) * of_groups).flatten(1).to(dtype)


class GpuLinears:
    """Makes layers on one device. They share a workspace, as they run one after the other."""

    quantizes_plain = False  # plain layers of a quantized checkpoint stay plain
    stacks_experts = True  # all experts of a block have one format, for one kernel
    block_bits = (2, 3, 4, 5, 6)  # of blocks with a GEMM

    def __init__(self, device: torch.device) -> None:
        self._workspace = SplitKWorkspace(device)
        self._has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
        self.identity = f"gpu, {'with' if self._has_fp8 else 'without'} e4m3"

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None, is_stacked: bool = False) -> Made | None:
        """Make a layer, or return None if no GEMM fits. rows.order is None.

        is_stacked: for an expert without a bias. Its inputs stay in 16 bits, so 8-bit weights may have scales of rows
        or of groups.
        """
        num_columns, group = rows.values.shape[1], rows.group_size
        if num_columns % COLUMN_MULTIPLE or (rows.is_fp8 and not self._has_fp8):
            return None
        if rows.is_int4:
            is_known = group % MIN_GROUP == 0 and num_columns % group == 0
            if not is_known or (is_stacked and not fits(num_columns, min(group & -group, MAX_GROUP), True)):
                return None
            packed = pack_w4(rows.values, rows.scales, rows.offsets_or_zeros())
            return w4a16_layer(packed, bias, self._workspace), "int4"
        if rows.is_packed:
            if is_stacked or not can_pack(rows.bits, num_columns, group):
                return None
            weight = pack_weight(rows.values, rows.scales, rows.offsets, rows.bits)
            return packed_layer(weight, bias, self._workspace), f"int{rows.bits}"
        name, is_eight_bit = "e4m3" if rows.is_fp8 else "int8", is_stacked or rows.quantizes_inputs
        if rows.has_row_scales and (rows.is_int8 or is_eight_bit):
            kind = FP8 if rows.is_fp8 else W8A8 if is_eight_bit else W8A16
            return kind.linear(rows.values, rows.scales, bias, self._workspace), name
        if is_stacked:
            are_filled = rows.offsets is None and num_columns == group * rows.scales.shape[1]
            if are_filled and fits(num_columns, group, False):
                return stored_layer(rows.values, rows.scales), f"{name} in groups"
        elif rows.is_fp8 and rows.quantizes_inputs:
            return FP8.of(Linear(rows.dequantize(torch.bfloat16), bias), self._workspace), "e4m3 of blocks"
        return None

    def of_plain(self, linear: Linear, quant_mode: str = "int8-weight", is_head: bool = False) -> Linear:
        """Quantize a plain layer to 8 bits, or leave it plain if no GEMM supports its size."""
        if linear.weight.shape[1] % COLUMN_MULTIPLE:
            return linear
        return MODES.get(quant_mode, (W8A16, W8A16))[is_head].of(linear, self._workspace)
