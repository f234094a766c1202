"""Formats of experts' stacked weights for grouped kernels, told by the dtypes of weights and scales.

    weight (experts, rows, columns)      scales
    16 or 32 bits                        None
    int8, e4m3                           float32 (experts, rows), or (experts, rows, groups) of columns
    words of int4, int16, columns / 4    bfloat16 (experts, rows, groups, 2): scale and offset, as in `PackedW4`
    words of e2m1, int16, columns / 4    uint8 (experts, rows, columns / 32): exponents, as in `kernels.quantization.
                                         mxfp4`, whose rows end in zeros that x may lack

x stays in 16 bits in all of them, so the weights are exactly those of the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantization.mxfp4 import filled
from kernels.quantization.w4a16_gemm import chunk_of

WORDS = torch.int16  # of four weights each
MIN_GROUP = 16  # columns, the least that a dot takes
MIN_CHUNK = 64  # four nibbles of 16 columns


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """A format. name: "whole" for unpacked weights, or a format of nibbles. group: columns that share a scale, 0: all
    of a row, or no scale. words: per chunk.
    """

    name: str
    group: int
    words: int
    has_row_scales: bool

    def columns_at_once(self, block_k: int) -> int:
        """Return the columns of a step of a kernel's loop: whole chunks, or at most those that share a scale."""
        if self.words:
            return max(block_k, 4 * self.words)
        return min(block_k, self.group & -self.group) if self.group else block_k

    def tile(self, block_n: int, block_k: int) -> tuple[int, int]:
        """Return rows and columns of a GEMV's step: equally many weights, of more rows if groups are narrower."""
        columns = self.columns_at_once(block_k)
        return block_n * max(1, block_k // columns), columns

    def num_filled(self, num_columns: int) -> int:
        """Return the weight's columns for an x of `num_columns`."""
        return filled(num_columns) if self.name == "e2m1" else num_columns

    def scales_of(self, scales: Tensor) -> Tensor:
        """Return the scales as kernels read them."""
        return scales.view(torch.int32) if self.name == "int4" else scales


def form_of(weight: Tensor, scales: Tensor | None) -> ExpertForm:
    """Return the format. Raises ValueError for groups that kernels do not support."""
    if scales is None or (weight.dtype != WORDS and scales.dim() == 2):
        return ExpertForm("whole", 0, 0, scales is not None)
    is_packed, num_columns = weight.dtype == WORDS, columns_of(weight)
    group = num_columns // scales.shape[2]
    words = chunk_of(num_columns) // 4 if is_packed else 0
    if group * scales.shape[2] != num_columns or not fits(num_columns, group, is_packed):
        raise ValueError(f"{num_columns} columns in {scales.shape[2]} groups are not supported")
    name = "whole" if not is_packed else "e2m1" if scales.dtype == torch.uint8 else "int4"
    return ExpertForm(name, group, words, False)


def fits(num_columns: int, group: int, is_packed: bool) -> bool:
    """Whether kernels support rows of `num_columns` in these groups: a nibble of adjacent words has one scale."""
    if not is_packed:
        return num_columns % group == 0 and (group & -group) >= MIN_GROUP
    chunk = chunk_of(num_columns)
    return chunk >= MIN_CHUNK and chunk % group == 0 and group % (chunk // 4) == 0


def columns_of(weight: Tensor) -> int:
    return weight.shape[-1] * (4 if weight.dtype == WORDS else 1)


def bytes_of(weight: Tensor) -> float:
    """Return the bytes of one weight, for tuning tables."""
    return 0.5 if weight.dtype == WORDS else weight.itemsize
