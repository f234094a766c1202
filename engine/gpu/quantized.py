"""Linear maps of quantized weights on a GPU, and how they are made: from plain weights, or from stored codes.

    W8A8Linear    int8 weights with one scale per row, x rounded to int8 per token
    W8A16Linear   the same, x rounded to 16 bits
    Fp8Linear     e4m3 weights and x
    W4A16Linear   4-bit weights in groups, x as it is or, of several rows, rounded to 16 bits

All take x (rows, in) in bfloat16 and may be captured in a CUDA graph.
Knows no models and no files. Products: `kernels.gpu.{w8a8_gemm,fp8_gemm,w4a16_gemm}`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

from engine.layers.linear import Linear
from kernels.fp8_gemm import FP8_DTYPE
from kernels.gpu.eight_bit import codes_product
from kernels.gpu.few_codes import choose_few, few_rows_gated
from kernels.gpu.fp8_gemm import fp8_product
from kernels.gpu.rounding import known_codes, quantize_rows, silu_codes
from kernels.gpu.small_m_gemm import SmallMWorkspace
from kernels.gpu.w4a16_gemm import w4a16_linear
from kernels.gpu.w8a8_gemm import MAX_PAIRED_ROWS, w8a16_linear
from kernels.w4a16_gemm import PackedW4

COLUMN_MULTIPLE = 16  # of inputs, for 8-bit products; others stay plain


class EightBitLinear(ABC):
    """Over one byte a weight, with a scale per row. Inputs are rounded to the type of the weights, or to two `digits`
    of it: the same result at any number of rows, up to `max_rounded`.
    """

    __slots__ = ("bias", "scales", "weight", "workspace")
    dtype = torch.int8
    digits = 1
    max_rounded = sys.maxsize

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SmallMWorkspace) -> None:
        """weight (out, in) of `dtype`, in a multiple of 16; scales (out,), or one for all."""
        if weight.dtype != self.dtype or weight.shape[1] % COLUMN_MULTIPLE:
            raise ValueError(f"{self.dtype} and a multiple of {COLUMN_MULTIPLE} columns are needed: {weight.shape}")
        self.weight = weight.contiguous()
        self.scales = scales.float().flatten().expand(weight.shape[0]).contiguous()
        self.bias = bias
        self.workspace = workspace  # serves one stream, shared by the maps of a model

    @classmethod
    def of(cls, linear: Linear, workspace: SmallMWorkspace) -> Self:
        """Round a plain map."""
        weight, scales = quantize_rows(linear.weight, cls.dtype)
        return cls(weight, scales, linear.bias, workspace)

    def __call__(self, x: Tensor) -> Tensor:
        return self.of_codes(*quantize_rows(x, self.dtype, self.digits), x.dtype)

    @abstractmethod
    def of_codes(self, codes: Tensor, x_scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Of inputs that are rounded already: (digits * rows, in), see `kernels.gpu.rounding`."""

    def gated_codes(self, codes: Tensor, x_scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same for gate and up beside each other: silu(gate) * up, rounded again, and its scales."""
        n, k = self.weight.shape
        config = choose_few(codes.shape[0], n // 2, k, is_gated=True)
        if config is None:
            return silu_codes(self.of_codes(codes, x_scales, dtype), self.dtype, self.digits)
        inner, maxima = few_rows_gated(codes, x_scales, self.weight, self.scales, self.bias, dtype, config)
        return known_codes(inner, maxima, self.dtype, self.digits)


class W8A8Linear(EightBitLinear):
    """int8 weights and inputs."""

    __slots__ = ()

    def of_codes(self, codes: Tensor, x_scales: Tensor, dtype: torch.dtype) -> Tensor:
        return codes_product(codes, x_scales, self.weight, self.scales, self.bias, dtype, self.workspace)


class W8A16Linear(W8A8Linear):
    """int8 weights, inputs of 16 bits."""

    __slots__ = ()
    digits = 2
    max_rounded = MAX_PAIRED_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        return w8a16_linear(x, self.weight, self.scales, self.bias, self.workspace)


class Fp8Linear(EightBitLinear):
    """e4m3 weights and inputs."""

    __slots__ = ()
    dtype = FP8_DTYPE

    def of_codes(self, codes: Tensor, x_scales: Tensor, dtype: torch.dtype) -> Tensor:
        return fp8_product(codes, x_scales, self.weight, self.scales, self.bias, dtype, self.workspace)


class W4A16Linear:
    """4-bit weights in groups; `kernels.w4a16_gemm.pack_w4` packs them."""

    __slots__ = ("bias", "packed", "workspace")

    def __init__(self, packed: PackedW4, bias: Tensor | None, workspace: SmallMWorkspace) -> None:
        self.packed = packed
        self.bias = bias
        self.workspace = workspace

    def __call__(self, x: Tensor) -> Tensor:
        return w4a16_linear(x, self.packed, self.bias, self.workspace)
