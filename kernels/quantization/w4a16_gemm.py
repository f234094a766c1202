"""GEMMs with int4 weights, with a scale and an offset per group of columns: packing and reference.

    y = x v^T + b,   v_nk = (w_nk - 8) s_ng + z_ng,  g = k / group_size

Four int4 weights share an int16 word. Columns are taken in chunks of C, the largest of 128, 64, 32, 16 that divides a
row: nibble i of a chunk's word j is column i C / 4 + j, in bits from 4 i on. So the same nibble of adjacent words
holds adjacent columns, and a word's four nibbles are a quarter of a chunk apart. Checkpoints with v = (w - zero) s
have z = (8 - zero) s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

MAX_GROUP = 128
MAX_CHUNK = 128


@dataclass(frozen=True, slots=True)
class PackedW4:
    """words: int16 (out, in / 4). scales_and_zeros: (out, in / group_size, 2), bfloat16 or float16."""

    words: Tensor
    scales_and_zeros: Tensor
    group_size: int

    @property
    def num_columns(self) -> int:
        return self.words.shape[1] * 4

    @property
    def chunk(self) -> int:
        """Columns per chunk, whose weights share words."""
        return chunk_of(self.num_columns)


def chunk_of(num_columns: int) -> int:
    """Return the chunk size of rows of `num_columns`."""
    return min(num_columns & -num_columns, MAX_CHUNK)


def pack_w4(values: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype = torch.bfloat16) -> PackedW4:
    """Pack values uint8 (out, in), 0 to 15, with scales and zeros (out, in / group_size).

    Groups are powers of two from 16 columns; those above 128 are stored as several. Raises ValueError for others.
    """
    num_columns = values.shape[1]
    group_size = num_columns // scales.shape[1]
    if group_size * scales.shape[1] != num_columns or zeros.shape != scales.shape or num_columns % 16:
        raise ValueError(f"values {list(values.shape)}, scales {list(scales.shape)} and zeros do not fit together")
    pair = torch.stack([scales, zeros], dim=-1).to(dtype)
    stored = min(group_size & -group_size, MAX_GROUP)
    if stored < 16:
        raise ValueError(f"groups of {group_size} columns are not supported: 16, 32, 64, 128 or multiples of those")
    pair = pair.repeat_interleave(group_size // stored, dim=1)
    return PackedW4(pack_words(values), pair.contiguous(), stored)


def pack_words(values: Tensor) -> Tensor:
    """Pack uint8 (..., columns), 0 to 15, to int16 (..., columns / 4)."""
    return pack_parts(values, 4, chunk_of(values.shape[-1]) // 4)


def unpack_words(words: Tensor) -> Tensor:
    """Undo `pack_words`; int16."""
    return unpack_parts(words, 4, chunk_of(words.shape[-1] * 4) // 4)


def pack_parts(values: Tensor, bits: int, num_words: int) -> Tensor:
    """Pack uint8 (..., columns), below 2^bits, to int16 (..., columns * bits / 16); num_words: per chunk."""
    parts = values.reshape(*values.shape[:-1], -1, 16 // bits, num_words)
    words = torch.zeros_like(parts[..., 0, :], dtype=torch.int16)
    for part in range(16 // bits):  # one at a time, to save memory
        words |= parts[..., part, :].to(torch.int16) << bits * part
    return words.flatten(-2)


def unpack_parts(words: Tensor, bits: int, num_words: int) -> Tensor:
    """Undo `pack_parts`; int16."""
    shifts = torch.arange(0, 16, bits, dtype=torch.int16, device=words.device)
    chunks = words.reshape(*words.shape[:-1], -1, 1, num_words)
    return ((chunks >> shifts[:, None]) & ((1 << bits) - 1)).flatten(-3)


def dequantize_w4(packed: PackedW4, dtype: torch.dtype) -> Tensor:
    """Dequantize to (out, in), computed in float32 and rounded once."""
    groups = unpack_words(packed.words).view(*packed.scales_and_zeros.shape[:2], packed.group_size).float().sub_(8)
    scales, zeros = packed.scales_and_zeros.float().unbind(-1)
    return groups.mul_(scales[..., None]).add_(zeros[..., None]).flatten(1).to(dtype)


def w4a16_linear(x: Tensor, packed: PackedW4, bias: Tensor | None = None) -> Tensor:
    """Compute x (rows, in) -> (rows, out) in the dtype of x."""
    y = functional.linear(x.float(), dequantize_w4(packed, torch.float32))
    return (y if bias is None else y + bias.float()).to(x.dtype)
