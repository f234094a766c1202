"""MXFP4 weights of a checkpoint: dequantized when they are taken, or kept for kernels of experts.

    name_blocks   uint8 (experts, out, in / 32, 16): two 4-bit numbers a byte, the low half first
    name_scales   uint8 (experts, out, in / 32): exponents of two, plus 127
    name          (experts, in, out) = number * 2^(scale - 127)

A number is a sign bit and an index into MAGNITUDES (e2m1). Defined by the OCP Microscaling formats.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional

from common.errors import ConfigError, UnsupportedModelError
from engine.layers.block import Block
from engine.layers.linear import Linear
from engine.layers.weights import Part, PartSource, WeightSource
from engine.loader.checkpoint import Shape
from engine.loader.safetensors import SafetensorsWeights
from engine.moe.stacked_moe import StackedMoe
from kernels.quantization.mxfp4 import EXPONENT_BIAS, GROUP_SIZE, MAGNITUDES, MAX_EXPONENT, filled, pack_mxfp4

BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4Source(PartSource):
    """Weights of which some are blocks and scales, from any source."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, Shape]:
        """Return the shapes of all weights, dequantized."""

    @abstractmethod
    def is_packed(self, name: str) -> bool:
        """Whether the weight is stored as blocks and scales."""

    @abstractmethod
    def read(self, name: str, experts: range, rows: range, groups: range) -> tuple[Tensor, Tensor]:
        """Return blocks and scales of a part of a weight. rows: its outputs. groups: of its inputs."""

    def give_experts(self, block: Block, parts: Mapping[str, Part], on_read: Callable[[str], None]) -> None:
        """Give a block's experts, which have no storage, their weights in the layout of the GPU's expert kernels.

        parts: of weights that this rank has a part of. on_read: called with the name of each weight read.
        """
        if not isinstance(block, StackedMoe):
            return
        for attribute in ("gate_up", "down"):
            layers = {slot: getattr(expert, attribute) for slot, expert in block.experts.items()}
            (name,) = next(iter(layers.values())).names
            if not self.is_packed(name):
                continue
            _, columns, rows = parts.get(name) or map(range, self.shapes[name])
            for slot, layer in layers.items():
                expert = block.rule.expert_of(slot)
                made = self._expert(name, expert, columns, rows, layer.bias, attribute == "gate_up")
                setattr(block.experts[slot], attribute, made)
            on_read(name)

    def _expert(
        self, name: str, expert: int, columns: range, rows: range, bias: Tensor | None, is_gate_up: bool
    ) -> Linear:
        from engine.quantization.gpu_linears import stored_layer  # needs triton

        groups = _groups_around(columns)
        stacked = self.read(name, range(expert, expert + 1), rows, groups)
        blocks, exponents = stacked[0][0], stacked[1][0]
        if (largest := int(exponents.max())) > MAX_EXPONENT:
            limits = f"2^{largest - EXPONENT_BIAS}, more than 2^{MAX_EXPONENT - EXPONENT_BIAS}"
            raise UnsupportedModelError(f"{name}: expert {expert} has a block that is scaled by {limits}")
        if is_gate_up:
            inner = filled_columns(range(rows.start // 2, rows.stop // 2))
            blocks, exponents = (_filled_rows(_halves(part), *inner) for part in (blocks, exponents))
            bias = None if bias is None else _filled_rows(bias, *inner)
        else:
            before, after = filled_columns(columns)
            blocks, exponents = _filled_groups(blocks, exponents, before, len(columns), after)
        return stored_layer(*pack_mxfp4(blocks, exponents), bias, blocks.shape[1] * GROUP_SIZE)


class Mxfp4Weights(Mxfp4Source):
    """A checkpoint with blocks and scales. Raises ConfigError for pairs that do not fit."""

    def __init__(self, tensors: SafetensorsWeights) -> None:
        self._tensors = tensors
        self._shapes: dict[str, Shape] = {}
        for name, shape in tensors.shapes.items():
            if name.endswith(BLOCKS):
                weight = name.removesuffix(BLOCKS)
                if len(shape) != 4 or shape[3] * 2 != GROUP_SIZE or tensors.shapes.get(weight + SCALES) != shape[:3]:
                    raise ConfigError(f"{weight}: blocks of {list(shape)} and their scales are no MXFP4 weight")
                self._shapes[weight] = (shape[0], shape[2] * GROUP_SIZE, shape[1])
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in tensors.shapes):
                self._shapes[name] = shape

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def is_packed(self, name: str) -> bool:
        return name + BLOCKS in self._tensors.tensors

    def take_part(self, name: str, part: Part) -> Tensor:
        """See PartSource."""
        if not self.is_packed(name):
            return self._tensors.take_part(name, part)
        return _dequantized_part(self, name, part, self._tensors.dtype)

    def read(self, name: str, experts: range, rows: range, groups: range) -> tuple[Tensor, Tensor]:
        """See Mxfp4Source."""
        part = experts, rows, groups
        blocks = self._tensors.read(name + BLOCKS, (*part, range(GROUP_SIZE // 2)))
        return blocks, self._tensors.read(name + SCALES, part)


class RandomMxfp4Weights(Mxfp4Source):
    """Random MXFP4 weights of experts, which have three dimensions; other weights come from `plain`."""

    def __init__(
        self, plain: WeightSource, shapes: Mapping[str, Shape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._plain, self._shapes, self._dtype, self._device = plain, shapes, dtype, device

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def is_packed(self, name: str) -> bool:
        return len(self._shapes[name]) == 3

    def take_part(self, name: str, part: Part) -> Tensor:
        """See PartSource."""
        if self.is_packed(name):
            return _dequantized_part(self, name, part, self._dtype)
        weight = self._plain.take(name, self._shapes[name])
        return weight[tuple(slice(indices.start, indices.stop) for indices in part)].contiguous()

    def read(self, name: str, experts: range, rows: range, groups: range) -> tuple[Tensor, Tensor]:
        """See Mxfp4Source. The standard deviation is about 0.02; an expert's numbers are the same on all ranks."""
        _, num_columns, num_rows = self._shapes[name]
        whole, found = (num_rows, -(-num_columns // GROUP_SIZE), GROUP_SIZE // 2), []
        for expert in experts:
            generator = torch.Generator(self._device).manual_seed(crc32(f"{name} {expert}".encode()))
            blocks = torch.randint(0, 256, whole, dtype=torch.uint8, device=self._device, generator=generator)
            found.append(blocks[rows.start : rows.stop, groups.start : groups.stop])
        blocks = torch.stack(found)
        return blocks, torch.full_like(blocks[..., 0], EXPONENT_BIAS - 7)


def _dequantized_part(source: Mxfp4Source, name: str, part: Part, dtype: torch.dtype) -> Tensor:
    experts, columns, rows = part
    groups = _groups_around(columns)
    weight = dequantize(*source.read(name, experts, rows, groups), dtype)
    first = columns.start - groups.start * GROUP_SIZE
    return weight[:, first : first + len(columns)].contiguous()


def filled_columns(columns: range) -> tuple[int, int]:
    """Return how many zero columns kernels need before and after a rank's inputs of `down`.

    Before: from the beginning of the group on. The total is whole chunks of packed weights, equal on all ranks.
    """
    before = columns.start % GROUP_SIZE
    most_before = GROUP_SIZE - math.gcd(len(columns), GROUP_SIZE)
    total = filled(len(columns) + most_before)
    return before, total - before - len(columns)


def _groups_around(columns: range) -> range:
    return range(columns.start // GROUP_SIZE, -(-columns.stop // GROUP_SIZE))


def _filled_groups(blocks: Tensor, exponents: Tensor, before: int, count: int, after: int) -> tuple[Tensor, Tensor]:
    """Zero and pad blocks (rows, groups, 16) and exponents, except `count` columns from `before` on."""
    if not before and not after:
        return blocks, exponents
    total = (before + count + after) // GROUP_SIZE
    missing = total - blocks.shape[1]
    blocks = functional.pad(blocks, (0, 0, 0, missing))
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
    nibbles[:, :before] = 0
    nibbles[:, before + count :] = 0
    pairs = nibbles.view(*blocks.shape, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), functional.pad(exponents, (0, missing), value=EXPONENT_BIAS)


def _filled_rows(rows: Tensor, before: int, after: int) -> Tensor:
    """Pad the rows of gate and the rows of up with zero rows on both sides."""
    halves = rows.view(2, -1, *rows.shape[1:])
    return functional.pad(halves, (0, 0) * (rows.dim() - 1) + (before, after)).flatten(0, 1)


def _halves(rows: Tensor) -> Tensor:
    """Reorder alternating rows of gate and up to gate, then up."""
    return rows.view(-1, 2, *rows.shape[1:]).transpose(0, 1).flatten(0, 1)


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize uint8 (experts, out, groups, 16) with scales uint8 (experts, out, groups) to (experts, in, out)."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=dtype, device=blocks.device)
    experts = []
    for packed, exponents in zip(blocks, scales, strict=True):  # one by one, since indices take 8 bytes each
        numbers = values[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).int()]
        scaled = torch.ldexp(numbers, exponents.int()[..., None] - EXPONENT_BIAS)
        experts.append(scaled.to(dtype).flatten(1).t())
    return torch.stack(experts)
