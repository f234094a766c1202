"""Weights that a checkpoint holds as MXFP4: dequantized when they are taken.

    name_blocks   uint8 (experts, out, in / 32, 16): two numbers of 4 bits a byte, the low half first
    name_scales   uint8 (experts, out, in / 32): exponents of two, plus 127
    name          (experts, in, out) = number * 2^(scale - 127)

A number is a sign bit and an index into MAGNITUDES (e2m1). Defined by the OCP Microscaling formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.layers.weights import Partition
from engine.loader.checkpoint import Shape
from engine.loader.safetensors import SafetensorsWeights
from kernels.mxfp4 import EXPONENT_BIAS, GROUP_SIZE, MAGNITUDES

BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4Weights:
    """A checkpoint some of whose weights are blocks and scales. Raises ConfigError for pairs that do not fit."""

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
        blocks, scales = self._tensors.read(name + BLOCKS), self._tensors.read(name + SCALES)
        return dequantize(blocks, scales, self._tensors.dtype)


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks uint8 (experts, out, groups, 16), scales uint8 (experts, out, groups) -> (experts, in, out)."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=dtype, device=blocks.device)
    experts = []
    for packed, exponents in zip(blocks, scales, strict=True):  # one by one: indices take 8 bytes each
        numbers = values[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).int()]
        scaled = torch.ldexp(numbers, exponents.int()[..., None] - EXPONENT_BIAS)
        experts.append(scaled.to(dtype).flatten(1).t())
    return torch.stack(experts)
