"""MXFP4 experts of gpt-oss: a GGUF file's blocks in a checkpoint's layout for GPUs, and the reverse for CPUs.

A GGUF block is 32 weights of one row in 17 bytes: the exponent, then byte i holds value i in its low half and value i
+ 16 in its high half. A checkpoint's byte i holds values 2 i and 2 i + 1. Numbers and exponents are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.gguf.weights import GgufFile, GgufWeights
from engine.layers.weights import Part
from engine.loader.checkpoint import Shape
from engine.models.config import ModelConfig
from engine.quantization.mxfp4 import Mxfp4Source
from kernels.gguf.linear import BLOCK_COLUMNS, Blocks

MXFP4 = 39  # ggml's type number
BLOCK_BYTES = 17
GATE_UP = "gate_up_proj"  # suffix of a checkpoint's stacked weight


def weights_of(
    file: GgufFile, config: ModelConfig, permuted: bool, dtype: torch.dtype, device: torch.device
) -> GgufWeights | GgufMxfp4Weights:
    """Return the weights of a file, whose experts may be MXFP4."""
    weights = GgufWeights(file, config, permuted, dtype, device)
    mxfp4 = {
        name: composed.stored
        for name, composed in weights.composed.items()
        if all(file.tensors[stored].type_id == MXFP4 for stored in composed.stored)
    }
    return GgufMxfp4Weights(file, weights, mxfp4, device) if mxfp4 else weights


class GgufMxfp4Weights(Mxfp4Source):
    """packed: the tensors of MXFP4 blocks of each stacked weight, gate and up or down (experts, rows, columns)."""

    def __init__(
        self, file: GgufFile, weights: GgufWeights, packed: dict[str, tuple[str, ...]], device: torch.device
    ) -> None:
        self._file, self._weights, self._packed, self._device = file, weights, packed, device

    @property
    def of_file(self) -> GgufWeights:
        """The weights as for other files: dequantized, or in the file's blocks."""
        return self._weights

    @property
    def shapes(self) -> dict[str, Shape]:
        return self._weights.shapes

    def is_packed(self, name: str) -> bool:
        return name in self._packed

    def take_part(self, name: str, part: Part) -> Tensor:
        """See PartSource."""
        return self._weights.take_part(name, part)

    def read(self, name: str, experts: range, rows: range, groups: range) -> tuple[Tensor, Tensor]:
        """See Mxfp4Source. Rows of gate and up alternate."""
        found = [self._of_expert(self._packed[name], expert)[rows.start : rows.stop] for expert in experts]
        blocks = torch.stack(found)[:, :, groups.start : groups.stop].to(self._device)
        halves = blocks[..., 1:]
        values = torch.cat([halves & 15, halves >> 4], dim=-1)
        return values[..., ::2] | (values[..., 1::2] << 4), blocks[..., 0].contiguous()

    def _of_expert(self, stored: tuple[str, ...], expert: int) -> Tensor:
        """Read an expert's blocks, uint8 (rows, groups, 17)."""
        num_rows = self._file.tensors[stored[0]].shape[1]
        rows = range(expert * num_rows, (expert + 1) * num_rows)
        turns = torch.stack([self._file.read_bytes(name, rows) for name in stored], dim=1)
        return turns.view(num_rows * len(stored), -1, BLOCK_BYTES)


class CheckpointBlocks:
    """A checkpoint's weights for `PackedConversion`: MXFP4 experts, copied to GGUF's layout, and plain ones."""

    label = "mxfp4"

    def __init__(self, source: Mxfp4Source) -> None:
        self._source = source

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._source.shapes

    def has_blocks(self, name: str) -> bool:
        return False

    def has_expert_blocks(self, name: str, num_columns: int) -> bool:
        """Whether `expert_blocks` returns experts of the stacked weight with `num_columns` columns."""
        return self._source.is_packed(name) and num_columns % BLOCK_COLUMNS[MXFP4] == 0

    def expert_blocks(self, name: str, expert: int, columns: range, rows: range) -> list[Blocks]:
        """Return an expert's outputs `rows` for its inputs `columns`, with alternating gate and up separated."""
        size, num_turns = BLOCK_COLUMNS[MXFP4], 2 if name.endswith(GATE_UP) else 1
        groups = range(columns.start // size, columns.stop // size)
        blocks, exponents = (part[0] for part in self._source.read(name, range(expert, expert + 1), rows, groups))
        values = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        halves = values[..., : size // 2] | (values[..., size // 2 :] << 4)
        packed = torch.cat([exponents[..., None], halves], dim=-1).flatten(1)
        return [Blocks(packed[turn::num_turns].contiguous(), MXFP4) for turn in range(num_turns)]

    def blocks(self, name: str, part: Part | None = None) -> None:
        """Return None, since only stacked weights are in blocks."""

    def take_part(self, name: str, part: Part) -> Tensor:
        """See PartSource."""
        return self._source.take_part(name, part)
