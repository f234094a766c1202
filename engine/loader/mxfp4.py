"""Weights that a checkpoint holds as MXFP4: dequantized when they are taken, or kept for kernels of experts.

    name_blocks   uint8 (experts, out, in / 32, 16): two numbers of 4 bits a byte, the low half first
    name_scales   uint8 (experts, out, in / 32): exponents of two, plus 127
    name          (experts, in, out) = number * 2^(scale - 127)

A number is a sign bit and an index into MAGNITUDES (e2m1). Defined by the OCP Microscaling formats.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.layers.block import Block
from engine.layers.linear import Linear
from engine.layers.stacked_moe import StackedMoe
from engine.layers.weights import Partition
from engine.loader.checkpoint import Shape
from engine.loader.safetensors import SafetensorsWeights
from kernels.mxfp4 import EXPONENT_BIAS, GROUP_SIZE, MAGNITUDES, pack_mxfp4

BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4Weights:
    """A checkpoint some of whose weights are blocks and scales. Raises ConfigError for pairs that do not fit.

    keeps_packed: blocks are taken without storage, for `place_packed_experts` to read.
    """

    keeps_packed = False

    def __init__(self, tensors: SafetensorsWeights) -> None:
        self._tensors = tensors
        self.shapes: dict[str, Shape] = {}
        for name, shape in tensors.shapes.items():
            if name.endswith(BLOCKS):
                weight = name.removesuffix(BLOCKS)
                if len(shape) != 4 or shape[3] * 2 != GROUP_SIZE or tensors.shapes.get(weight + SCALES) != shape[:3]:
                    raise ConfigError(f"{weight}: blocks of {list(shape)} and their scales are no MXFP4 weight")
                self.shapes[weight] = (shape[0], shape[2] * GROUP_SIZE, shape[1])
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in tensors.shapes):
                self.shapes[name] = shape

    def take(self, name: str, shape: Shape, partition: Partition = Partition.NONE) -> Tensor:
        """See WeightSource."""
        if name + BLOCKS not in self._tensors.tensors:
            return self._tensors.take(name, shape, partition)
        if self.keeps_packed:
            return torch.empty(self.shapes[name], dtype=self._tensors.dtype, device="meta")
        return dequantize(*self.read(name), self._tensors.dtype)

    def read(self, name: str) -> tuple[Tensor, Tensor]:
        """Blocks and scales of a weight."""
        return self._tensors.read(name + BLOCKS), self._tensors.read(name + SCALES)


def place_packed_experts(block: Block, weights: Mxfp4Weights, on_read: Callable[[str], None]) -> None:
    """Give experts that have no storage yet the checkpoint's numbers, as a GPU's kernels of experts read them."""
    from engine.gpu.quantized import Mxfp4Linear  # needs triton

    if not isinstance(block, StackedMoe):
        return
    for attribute in ("gate_up", "down"):
        layers = {index: getattr(expert, attribute) for index, expert in block.experts.items()}
        plain: Linear = next(iter(layers.values()))
        if not plain.weight.is_meta:
            continue
        (name,) = plain.names
        stacked = weights.read(name)
        for index, layer in layers.items():
            blocks, exponents = (rows[index] for rows in stacked)
            if attribute == "gate_up":
                blocks, exponents = _halves(blocks), _halves(exponents)
            made = Mxfp4Linear(pack_mxfp4(blocks), exponents.clone(), layer.bias)
            setattr(block.experts[index], attribute, made)
        on_read(name)


def _halves(rows: Tensor) -> Tensor:
    """Rows of gate and up, which take turns, behind each other."""
    return rows.view(-1, 2, *rows.shape[1:]).transpose(0, 1).flatten(0, 1)


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks uint8 (experts, out, groups, 16), scales uint8 (experts, out, groups) -> (experts, in, out)."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=dtype, device=blocks.device)
    experts = []
    for packed, exponents in zip(blocks, scales, strict=True):  # one by one: indices take 8 bytes each
        numbers = values[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).int()]
        scaled = torch.ldexp(numbers, exponents.int()[..., None] - EXPONENT_BIAS)
        experts.append(scaled.to(dtype).flatten(1).t())
    return torch.stack(experts)
