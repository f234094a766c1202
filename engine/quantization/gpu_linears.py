"""Linear layers of quantized weights on a GPU: their GEMMs, and which of these takes which rows or plain layers.

    W8A8     int8 weights with one scale per row, x quantized to int8 per token
    W8A16    the same, x quantized to 16 bits, as two int8 planes
    FP8      e4m3 weights and x
    w4a16    4-bit weights in groups, x as it is
    packed   blocks of 2, 3, 5 or 6 bits of GGUF files, likewise
    stored   one byte a weight with a scale per group of columns, or e2m1 weights with exponents of groups: for
             experts, whose kernels take them; as a layer by itself it is dequantized for every use

Stored values are taken as they are. Two exceptions: scales of e4m3 blocks become scales of rows, which quantizes
weights to e4m3 once more (2.6% of their size, as the first time), because tensor cores apply one scale per row; and
what no GEMM takes becomes int8 (0.8%). `--quant-mode none` keeps the exact numbers in bfloat16. Experts' weights of
blocks keep their scales: grouped kernels multiply inputs of 16 bits.

All take x (rows, in) in bfloat16 and may be captured in a CUDA graph.
Knows no models and no files. GEMMs: `kernels.gpu.quantization.{quantized_gemm,packed_linear}`.
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

COLUMN_MULTIPLE = 16  # of inputs, for 8-bit GEMMs; others stay plain
FP8_CAPABILITY = (8, 9)  # of GPUs with tensor cores for e4m3
MIN_GROUP = 16  # columns, of 4-bit groups; they are powers of two or multiples of one
QuantizedInput = tuple[Tensor, Tensor]  # values (num_planes * rows, in), float32 scales (rows,)


@dataclass(frozen=True, slots=True)
class EightBit:
    """GEMM of one byte a weight, with a scale per row. Inputs are quantized to the type of the weights, or to two
    planes of it: the same result at any number of rows, up to `max_quantized_rows`.

    Two int8 planes add less error to a row than bfloat16 did, while its largest element is below 187 times its root
    mean square; sqrt(K) times is the most (docs/decisions/quantized-linear-layers.md). With many rows writing the
    weight out in the dtype of x is faster.
    """

    dtype: torch.dtype
    num_planes: int = 1
    max_quantized_rows: int = sys.maxsize

    def linear(self, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SplitKWorkspace) -> Linear:
        """weight (out, in) of `dtype`, in a multiple of 16; scales (out,), or one for all."""
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
        """Multiply by gate and up, which lie beside each other: silu(gate) * up, quantized again."""
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
MODES = {"fp8": (FP8, W8A8), "w8a8": (W8A8, W8A8)}  # the head's: int8 keeps more greedy tokens there than e4m3


def w4a16(layer: Linear, x: Tensor) -> Tensor:
    return w4a16_linear(x, packed_of(layer), layer.bias, layer.workspace)


def w4a16_layer(packed: PackedW4, bias: Tensor | None, workspace: SplitKWorkspace) -> Linear:
    """4-bit weights in groups; `kernels.quantization.w4a16_gemm.pack_w4` packs them."""
    return Linear(
        packed.words, bias, gemm=w4a16, scales=packed.scales_and_zeros, group_size=packed.group_size,
        num_columns=packed.num_columns, workspace=workspace,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedGemm:
    """GEMM of blocks of other bits than 4."""

    packed: PackedWeight

    def __call__(self, layer: Linear, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, layer.bias, layer.workspace)


def packed_layer(packed: PackedWeight, bias: Tensor | None, workspace: SplitKWorkspace) -> Linear:
    """Weights of 2, 3, 5 or 6 bits; `kernels.quantization.packed_weights.pack_weight` packs them."""
    return Linear(
        packed.words, bias, gemm=PackedGemm(packed), scales=packed.pairs, num_columns=packed.num_columns,
        workspace=workspace,
    )  # fmt: skip


def packed_of(layer: Linear) -> PackedW4:
    """The weight of a `w4a16_layer`."""
    return PackedW4(layer.weight, scales_of(layer), layer.group_size)


def scales_of(layer: Linear) -> Tensor:
    assert layer.scales is not None, "quantized weights have them"
    return layer.scales


def stored(layer: Linear, x: Tensor) -> Tensor:
    return functional.linear(x, dequantized(layer, x.dtype), layer.bias)


def stored_layer(weight: Tensor, scales: Tensor, bias: Tensor | None = None, num_columns: int = 0) -> Linear:
    """weight (out, ...), scales (out, groups): see `kernels/gpu/moe/expert_formats.py`.

    num_columns: those that are not filled; 0: all.
    """
    columns = columns_of(weight)
    return Linear(
        weight, bias, gemm=stored, scales=scales, group_size=columns // scales.shape[1],
        num_columns=num_columns or columns,
    )  # fmt: skip


def dequantized(layer: Linear, dtype: torch.dtype) -> Tensor:
    """(out, in) of quantized weights in any form, computed in float32."""
    weight, scales = layer.weight, scales_of(layer)
    if scales.dtype == torch.uint8:
        return dequantize_mxfp4(weight, scales, dtype)[:, : layer.num_columns]
    if weight.dtype == WORDS:
        return dequantize_w4(packed_of(layer), dtype)
    of_groups = scales.view(len(scales), -1, 1)
    return (weight.float().view(*of_groups.shape[:2], -1) * of_groups).flatten(1).to(dtype)


class GpuLinears:
    """Makes layers of one device. They share a workspace, as they run one after the other."""

    quantizes_plain = False  # layers that a quantized checkpoint left plain stay so
    stacks_experts = True  # layers of a block's experts are alike: one kernel takes them all
    block_bits = (2, 3, 4, 5, 6)  # of blocks that have GEMMs

    def __init__(self, device: torch.device) -> None:
        self._workspace = SplitKWorkspace(device)
        self._has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
        self.identity = f"gpu, {'with' if self._has_fp8 else 'without'} e4m3"

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None, is_stacked: bool = False) -> Made | None:
        """None for rows that no GEMM takes. rows.order is None.

        is_stacked: of an expert without a bias. Its inputs stay in 16 bits, so weights of 8 bits may have scales of
        rows or of groups.
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
        """Quantize a plain layer to 8 bits, or leave it as it is where no GEMM takes it."""
        if linear.weight.shape[1] % COLUMN_MULTIPLE:
            return linear
        return MODES.get(quant_mode, (W8A16, W8A16))[is_head].of(linear, self._workspace)
