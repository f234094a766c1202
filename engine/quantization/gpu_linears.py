"""Linear layers of quantized weights on a GPU, and how they are made: from plain weights, or from stored values.

    W8A8Linear    int8 weights with one scale per row, x quantized to int8 per token
    W8A16Linear   the same, x quantized to 16 bits, as two int8 planes
    Fp8Linear     e4m3 weights and x
    W4A16Linear   4-bit weights in groups, x as it is or, of several rows, quantized to 16 bits
    GroupedEightBit   one byte a weight, a scale per group of columns: for experts, whose kernels take them
    Mxfp4Linear   e2m1 weights with exponents of groups, for experts as well

All take x (rows, in) in bfloat16 and may be captured in a CUDA graph.
Knows no models and no files. GEMMs: `kernels.gpu.{quantized_gemm,w4a16_gemm}`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear import Linear
from kernels.gpu.gemm.sliced_k_gemm import sliced_k_gated_gemm
from kernels.gpu.gemm.split_k import SplitKWorkspace
from kernels.gpu.launching.tuning import MAX_TWO_PLANE_ROWS, SLICED_K_GATED
from kernels.gpu.moe.expert_formats import columns_of
from kernels.gpu.quantization.quantize import quantize_rows, quantize_with_maxima, silu_mul_quantize
from kernels.gpu.quantization.quantized_gemm import dequantize, quantized_gemm
from kernels.gpu.quantization.w4a16_gemm import w4a16_linear
from kernels.quantization.mxfp4 import dequantize_mxfp4
from kernels.quantization.quantized_gemm import FP8_DTYPE
from kernels.quantization.w4a16_gemm import PackedW4, dequantize_w4

COLUMN_MULTIPLE = 16  # of inputs, for 8-bit GEMMs; others stay plain
QuantizedInput = tuple[Tensor, Tensor]  # values (num_planes * rows, in), float32 scales (rows,)


class EightBitLinear:
    """One byte a weight, with a scale per row. Inputs are quantized to the type of the weights, or to two planes of
    it: the same result at any number of rows, up to `max_quantized_rows`.
    """

    __slots__ = ("bias", "scales", "weight", "workspace")
    dtype = torch.int8
    num_planes = 1
    max_quantized_rows = sys.maxsize

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SplitKWorkspace) -> None:
        """weight (out, in) of `dtype`, in a multiple of 16; scales (out,), or one for all."""
        if weight.dtype != self.dtype or weight.shape[1] % COLUMN_MULTIPLE:
            raise ValueError(f"{self.dtype} and a multiple of {COLUMN_MULTIPLE} columns are needed: {weight.shape}")
        self.weight = weight.contiguous()
        self.scales = scales.float().flatten().expand(weight.shape[0]).contiguous()
        self.bias = bias
        self.workspace = workspace  # serves one stream, shared by the layers of a model

    @classmethod
    def of(cls, linear: Linear, workspace: SplitKWorkspace) -> Self:
        """Quantize a plain layer."""
        weight, scales = quantize_rows(linear.weight, cls.dtype)
        return cls(weight, scales, linear.bias, workspace)

    def __call__(self, x: Tensor) -> Tensor:
        return self.gemm(*quantize_rows(x, self.dtype, self.num_planes), x.dtype)

    def gemm(self, values: Tensor, x_scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply a `QuantizedInput`, see `kernels.gpu.quantization.quantize`. Returns (rows, out) in `dtype`."""
        return quantized_gemm(values, x_scales, self.weight, self.scales, self.bias, dtype, self.workspace)

    def gated_gemm(self, values: Tensor, x_scales: Tensor, dtype: torch.dtype) -> QuantizedInput:
        """Multiply by gate and up, which lie beside each other: silu(gate) * up, quantized again."""
        n, k = self.weight.shape
        config = SLICED_K_GATED.find(values.shape[0], n // 2, k)
        if config is None:
            return silu_mul_quantize(self.gemm(values, x_scales, dtype), self.dtype, self.num_planes)
        inner, maxima = sliced_k_gated_gemm(values, x_scales, self.weight, self.scales, self.bias, dtype, config)
        return quantize_with_maxima(inner, maxima, self.dtype, self.num_planes)


class W8A8Linear(EightBitLinear):
    """int8 weights and inputs."""

    __slots__ = ()


class W8A16Linear(EightBitLinear):
    """int8 weights, inputs of 16 bits as two planes.

    That adds less error to a row than bfloat16 did, while its largest element is below 187 times its
    root mean square; sqrt(K) times is the most (docs/decisions/0094). With many rows writing the weight out in the
    dtype of x is faster.
    """

    __slots__ = ()
    num_planes = 2
    max_quantized_rows = MAX_TWO_PLANE_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > MAX_TWO_PLANE_ROWS:
            return functional.linear(x, dequantize(self.weight, self.scales, x.dtype), self.bias)
        return super().__call__(x)


class Fp8Linear(EightBitLinear):
    """e4m3 weights and inputs."""

    __slots__ = ()
    dtype = FP8_DTYPE


class W4A16Linear:
    """4-bit weights in groups; `kernels.quantization.w4a16_gemm.pack_w4` packs them."""

    __slots__ = ("bias", "packed", "workspace")

    def __init__(self, packed: PackedW4, bias: Tensor | None, workspace: SplitKWorkspace) -> None:
        self.packed = packed
        self.bias = bias
        self.workspace = workspace

    @property
    def device(self) -> torch.device:
        return self.packed.words.device

    @property
    def num_columns(self) -> int:
        return self.packed.num_columns

    @property
    def group_size(self) -> int:
        return self.packed.group_size

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """(out, in), computed in float32."""
        return dequantize_w4(self.packed, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return w4a16_linear(x, self.packed, self.bias, self.workspace)


class ExpertLinear(ABC):
    """Stored values for the kernels of a layer's experts. As a layer by itself it is dequantized for every use."""

    __slots__ = ("bias", "scales", "weight")

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        """weight (out, ...), scales (out, groups): see `kernels/gpu/moe/expert_formats.py`."""
        self.weight = weight
        self.scales = scales
        self.bias = bias

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def num_columns(self) -> int:
        return columns_of(self.weight)

    @property
    def group_size(self) -> int:
        return columns_of(self.weight) // self.scales.shape[1]

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """(out, in), computed in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.dequantize(x.dtype), self.bias)


class GroupedEightBit(ExpertLinear):
    """weight: int8 or e4m3 (out, in). scales: float32."""

    __slots__ = ()

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        groups = self.weight.float().view(*self.scales.shape, -1)
        return (groups * self.scales[:, :, None]).flatten(1).to(dtype)


class Mxfp4Linear(ExpertLinear):
    """weight: words of e2m1, scales: exponents, as `pack_mxfp4` makes them."""

    __slots__ = ("_num_columns",)

    def __init__(self, weight: Tensor, scales: Tensor, num_columns: int, bias: Tensor | None = None) -> None:
        """num_columns: those that are not filled."""
        super().__init__(weight, scales, bias)
        self._num_columns = num_columns

    @property
    def num_columns(self) -> int:
        return self._num_columns

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return dequantize_mxfp4(self.weight, self.scales, dtype)[:, : self.num_columns]
