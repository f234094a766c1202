"""Weights of a block's experts on a GPU, stacked in the formats of `kernels/gpu/moe/expert_formats.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import UnsupportedModelError
from engine.layers.linear import Linear
from engine.moe.moe import Moe
from engine.quantization.gpu_linears import W8A16, dequantized
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.moe.expert_formats import WORDS, bytes_of, fits
from kernels.quantization.quantized_gemm import FP8_DTYPE
from kernels.quantization.w4a16_gemm import pack_words, unpack_words


@dataclass(frozen=True, slots=True)
class Stack:
    """Weight and scales of a layer, or of all experts (num_experts, ...): see `kernels/gpu/moe/expert_formats.py`.

    bias: (out,) or (num_experts, out), or None.
    """

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None = None

    @property
    def itemsize(self) -> float:
        return bytes_of(self.weight)

    @property
    def multiplies_e4m3(self) -> bool:
        """Whether tensor cores can multiply it as it is stored by an e4m3 x."""
        return self.weight.dtype == FP8_DTYPE and self.scales is not None and self.scales.dim() == 2


class StackedExperts:
    """The stacked weights of a block's experts; the experts' own weights become views of them.

    gate_up: (2 inner, hidden) for each expert. down: (hidden, inner) for each. Shared experts follow the routed ones,
    as experts of the same size that every token chooses, and the block then has none. router: in the model's type,
    although `Moe` may have converted it to float32; the gate of shared experts is its last row. gate: see
    `grouped_gemm`.
    """

    def __init__(self, block: Moe) -> None:
        """Raise UnsupportedModelError for experts of several formats."""
        self.num_shared = 0
        self.gate = (block.rule.swiglu_alpha, block.rule.swiglu_limit)
        self.router = block.router.to(block.norm.dtype)
        if block.shared_gate is not None:
            self.router = torch.cat([self.router, block.shared_gate])
        inner = block.rule.intermediate_size
        for expert in block.experts.values():
            expert.gate_up, expert.down = stackable(expert.gate_up), stackable(expert.down)
        more_gate_up: list[Stack] = []
        more_down: list[Stack] = []
        if block.shared is not None:
            self.num_shared, rest = divmod(block.rule.shared_size, inner)
            if rest:
                raise UnsupportedModelError("a rank has less than one shared expert: leave --expert-parallel out")
            more_gate_up = gate_up_pieces(stack_of(stackable(block.shared.gate_up)), self.num_shared)
            more_down = down_pieces(stack_of(stackable(block.shared.down, inner)), self.num_shared)
            block.shared = None
        self.gate_up = stacked([expert.gate_up for expert in block.experts.values()], more_gate_up)
        self.down = stacked([expert.down for expert in block.experts.values()], more_down)


def prepare(block: Moe) -> None:
    """Stack the experts' weights once; the runners that measure memory and that serve share them."""
    if block.stacked is None:
        block.stacked = StackedExperts(block)


def stacked_of(block: Moe) -> StackedExperts:
    """Return the stacked experts of a prepared block."""
    assert isinstance(block.stacked, StackedExperts), "`prepare` comes before ops"
    return block.stacked


def stackable(layer: Linear, piece: int | None = None) -> Linear:
    """Return the layer, converted to int8 if grouped kernels do not support its groups. piece: columns of a piece."""
    if layer.order is not None or layer.dense is not None:
        raise UnsupportedModelError("experts on a GPU are plain or quantized linear layers")
    if layer.scales is None or not layer.group_size:
        return layer
    if layer.scales.dtype == torch.uint8:
        fits_kernels = piece is None  # no model has both
    else:
        fits_kernels = fits(piece or layer.num_columns, layer.group_size, layer.weight.dtype == WORDS)
    if fits_kernels:
        return layer
    plain = Linear(dequantized(layer, torch.bfloat16), layer.bias)
    return W8A16.of(plain, SplitKWorkspace(layer.weight.device, 1, 1))


def stack_of(layer: Linear) -> Stack:
    """Return the stack of one layer."""
    return Stack(layer.weight, layer.scales, layer.bias)


def gate_up_pieces(layer: Stack, count: int) -> list[Stack]:
    """Cut gate_up, which has no bias, into `count` experts that together compute the same."""

    def pieces(rows: Tensor) -> list[Tensor]:
        gate, up = rows.view(2, count, -1, *rows.shape[1:])
        return list(torch.cat([gate, up], dim=1))

    scales = [None] * count if layer.scales is None else pieces(layer.scales)
    return [Stack(*piece) for piece in zip(pieces(layer.weight), scales, strict=True)]


def down_pieces(layer: Stack, count: int) -> list[Stack]:
    """Cut down into `count` experts, see `gate_up_pieces`."""
    weight, scales = layer.weight, layer.scales
    is_packed = weight.dtype == WORDS
    columns = unpack_words(weight) if is_packed else weight
    weights = columns.view(len(columns), count, -1).unbind(1)
    if is_packed:  # whose words hold other columns than those of a wider weight
        weights = tuple(pack_words(values) for values in weights)
    if scales is None or scales.dim() == 1:
        return [Stack(piece, scales) for piece in weights]
    groups = scales.view(len(scales), count, -1, *scales.shape[2:]).unbind(1)
    return [Stack(*piece) for piece in zip(weights, groups, strict=True)]


def stacked(layers: list[Linear], more: list[Stack]) -> Stack:
    stacks = [*map(stack_of, layers), *more]
    if len({(each.weight.dtype, each.scales is None or each.scales.shape) for each in stacks}) > 1:
        raise UnsupportedModelError("a layer's experts must all be quantized alike, or none of them")
    weights = torch.stack([each.weight for each in stacks])
    known = [each.scales for each in stacks if each.scales is not None]
    scales = torch.stack(known) if known else None
    for index, layer in enumerate(layers):
        layer.weight, layer.scales = weights[index], None if scales is None else scales[index]
    biases = [each.bias for each in stacks if each.bias is not None]
    return Stack(weights, scales, torch.stack(biases) if biases else None)
