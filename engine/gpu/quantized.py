"""Linear maps of quantized weights on a GPU, and how they are made: from plain weights, or from stored codes.

    W8A8Linear    int8 weights with one scale per row, x rounded to int8 per token
    Fp8Linear     the same with e4m3
    W8A16Linear   int8 weights, x as it is
    W4A16Linear   4-bit weights in groups, x as it is

All take x (rows, in) in bfloat16 and may be captured in a CUDA graph; a row's result does not depend on its company.
Knows no models and no files. Products: `kernels.gpu.{w8a8_gemm,fp8_gemm,w4a16_gemm}`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.layers.decoder import DecoderLayer
from engine.layers.linear import Linear
from kernels.fp8_gemm import FP8_DTYPE
from kernels.gpu.eight_bit import NO_ROW_MAX, RowMax, choose_row, one_row, quantize_rows
from kernels.gpu.fp8_gemm import fp8_linear
from kernels.gpu.small_m_gemm import SmallMWorkspace
from kernels.gpu.w4a16_gemm import w4a16_linear
from kernels.gpu.w8a8_gemm import w8a8_linear, w8a16_linear
from kernels.w4a16_gemm import PackedW4

COLUMN_MULTIPLE = 16  # of inputs, for 8-bit products; others stay plain


class EightBitLinear:
    """y = (x W^T) * scales + b over one byte a weight. What differs between the three stands first."""

    __slots__ = ("bias", "row_max", "scales", "weight", "workspace")
    dtype = torch.int8
    rounds_x = True
    product = staticmethod(w8a8_linear)

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, workspace: SmallMWorkspace) -> None:
        """weight (out, in) of `dtype`, in a multiple of 16; scales (out,), or one for all."""
        if weight.dtype != self.dtype or weight.shape[1] % COLUMN_MULTIPLE:
            raise ValueError(f"{self.dtype} and a multiple of {COLUMN_MULTIPLE} columns are needed: {weight.shape}")
        self.weight = weight.contiguous()
        self.scales = scales.float().flatten().expand(weight.shape[0]).contiguous()
        self.bias = bias
        self.workspace = workspace  # serves one stream, shared by the maps of a model
        self.row_max = NO_ROW_MAX

    @classmethod
    def of(cls, linear: Linear, workspace: SmallMWorkspace) -> EightBitLinear:
        """Round a plain map."""
        weight, scales = quantize_rows(linear.weight, cls.dtype)
        return cls(weight, scales, linear.bias, workspace)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.scales, self.bias, self.workspace)

    def row(self, x: Tensor, norm: Tensor | None, eps: float, added_to: Tensor | None, is_gated: bool) -> Tensor:
        """One row with norm, gate and residual inside, see `kernels.gpu.eight_bit.one_row`."""
        n, k = self.weight.shape
        config = choose_row(n, k, self.rounds_x, is_gated)
        return one_row(
            x, self.weight, self.scales, self.bias, config, self.rounds_x, norm, eps, added_to, is_gated, self.row_max
        )


class W8A8Linear(EightBitLinear):
    """int8 weights and inputs."""

    __slots__ = ()


class W8A16Linear(EightBitLinear):
    """int8 weights, inputs as they are."""

    __slots__ = ()
    rounds_x = False
    product = staticmethod(w8a16_linear)


class Fp8Linear(EightBitLinear):
    """e4m3 weights and inputs."""

    __slots__ = ()
    dtype = FP8_DTYPE
    product = staticmethod(fp8_linear)


class W4A16Linear:
    """4-bit weights in groups; `kernels.w4a16_gemm.pack_w4` packs them."""

    __slots__ = ("bias", "packed", "workspace")

    def __init__(self, packed: PackedW4, bias: Tensor | None, workspace: SmallMWorkspace) -> None:
        self.packed = packed
        self.bias = bias
        self.workspace = workspace

    def __call__(self, x: Tensor) -> Tensor:
        return w4a16_linear(x, self.packed, self.bias, self.workspace)


def share_row_maxima(layers: Sequence[DecoderLayer]) -> None:
    """Let `row` of each map tell that of the next the largest value of its input: rounding needs it first.

    Three places a layer: the inputs of qkv, of gate_up and of down. A place must be zero before it is written; it is
    cleared by a map that runs after its reader, in the same step or the next. Input of the first qkv, and of the
    attention's output projection, is looked through by the products themselves.
    """
    count = len(layers)
    places = torch.zeros(count, 3, 1, dtype=torch.float32, device=layers[0].attention_norm.device)
    for index, layer in enumerate(layers):
        qkv, output, gate_up, down = maps_of(layer)
        before_attention, before_mlp, inner = places[index]
        is_last = index + 1 == count
        qkv.row_max = RowMax(of_input=before_attention if index else None, cleared=places[index - 1, 2])
        output.row_max = RowMax(of_output=before_mlp, output_norm=layer.mlp_norm)
        gate_up.row_max = RowMax(of_input=before_mlp, of_output=inner, cleared=before_attention)
        down.row_max = RowMax(
            of_input=inner,
            of_output=None if is_last else places[index + 1, 0],
            output_norm=None if is_last else layers[index + 1].attention_norm,
            cleared=before_mlp,
        )


def has_rows(layer: DecoderLayer) -> bool:
    """Whether all of the layer's maps take single rows with norm, gate and residual inside."""
    return all(
        isinstance(linear, EightBitLinear)
        for linear in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
    )


def maps_of(layer: DecoderLayer) -> tuple[EightBitLinear, EightBitLinear, EightBitLinear, EightBitLinear]:
    """qkv, attention_output, gate_up, down of a layer that `has_rows`."""
    qkv, output, gate_up, down = layer.qkv, layer.attention_output, layer.gate_up, layer.down
    assert isinstance(qkv, EightBitLinear)
    assert isinstance(output, EightBitLinear)
    assert isinstance(gate_up, EightBitLinear)
    assert isinstance(down, EightBitLinear)
    return qkv, output, gate_up, down
