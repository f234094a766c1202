"""Packed weights of 4, 5 or 6 bits with scales of groups: packing, and reference of their GEMMs.

    w_nk = (q_nk - 2^(bits - 1)) s_ng + z_ng,  g = k / group size

The four low bits of q lie in words as those of `kernels/quantization/w4a16_gemm.py`, in chunks of C = 128 columns,
of 64 with 6 bits: nibble i of a chunk's word j is column i C / 4 + j. The high bits of two chunks share numbers of
`high`, bytes of 5 and words of 6 bits: number j has those of all columns i C / 4 + j, the lowest of the first
column. Weights of 6 bits have groups of 16 columns and no zeros: a pair is the scales of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.quantization.w4a16_gemm import MAX_CHUNK, PackedW4, pack_words, unpack_words

CHUNKS = {4: MAX_CHUNK, 5: MAX_CHUNK, 6: 64}  # columns whose low bits share words
STEPS = {4: MAX_CHUNK, 5: 256, 6: 128}  # columns whose bits share words and numbers of `high`
GROUPS = {5: 32, 6: 16}  # columns that share a scale
NUM_PARTS = 8  # nibbles of the chunks that share `high`


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """words: int16 (out, in / 4). high: uint8 (out, in / 8) of 5 bits, int16 (out, in / 8) of 6, None of 4.

    pairs: bfloat16 (out, in / group size, 2), (s, z); of 6 bits (out, in / 32, 2), two scales.
    """

    words: Tensor
    high: Tensor | None
    pairs: Tensor
    bits: int

    @property
    def num_columns(self) -> int:
        return self.words.shape[1] * 4

    @property
    def pair_columns(self) -> int:
        """Columns of a pair."""
        return self.num_columns // self.pairs.shape[1]


def of_w4(packed: PackedW4) -> PackedWeight:
    """The same weight; its chunks must be of 128 columns."""
    return PackedWeight(packed.words, None, packed.scales_and_zeros, 4)


def can_pack(bits: int, num_columns: int, group_size: int) -> bool:
    """Whether `pack_weight` takes weights of more than 4 bits."""
    return bits in GROUPS and group_size == GROUPS[bits] and num_columns % STEPS[bits] == 0


def pack_weight(values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> PackedWeight:
    """values uint8 (out, in), below 2^bits, 5 or 6; scales (out, groups), zeros likewise, of 5 bits alone.

    Raises ValueError for columns and groups that `can_pack` denies.
    """
    (num_rows, num_columns), group = values.shape, values.shape[1] // scales.shape[1]
    if not can_pack(bits, num_columns, group) or (bits == 6) != (zeros is None):
        raise ValueError(f"{bits} bits of {num_columns} columns in groups of {group}: not supported")
    pairs = scales.view(num_rows, -1, 2) if zeros is None else torch.stack([scales, zeros], dim=-1)
    upper = (values >> 4).view(num_rows, -1, NUM_PARTS, CHUNKS[bits] // 4)
    high = torch.zeros_like(upper[:, :, 0], dtype=torch.int16)
    for part in range(NUM_PARTS):  # one at a time: little extra memory
        high |= upper[:, :, part].short() << (bits - 4) * part
    high = high.flatten(1).to(torch.uint8 if bits == 5 else torch.int16)
    return PackedWeight(pack_words(values & 15, CHUNKS[bits]), high, pairs.bfloat16().contiguous(), bits)


def dequantize_packed(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """(out, in), computed in float32 and cast once."""
    bits, chunk = packed.bits, CHUNKS[packed.bits]
    values = unpack_words(packed.words, chunk).int()
    if packed.high is not None:
        high = packed.high.view(len(values), -1, 1, chunk // 4).int()
        shifts = (bits - 4) * torch.arange(NUM_PARTS, dtype=torch.int32, device=high.device)[:, None]
        values |= ((high >> shifts) & ((1 << bits - 4) - 1)).flatten(1) << 4
    pairs, weight = packed.pairs.float(), (values - (1 << bits - 1)).float()
    if bits == 6:
        return (weight.view(*pairs.shape, -1) * pairs[..., None]).flatten(1).to(dtype)
    scales, zeros = pairs.unbind(-1)
    return (weight.view(*scales.shape, -1) * scales[..., None] + zeros[..., None]).flatten(1).to(dtype)


def packed_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x (rows, in) -> (rows, out) in the dtype of x."""
    y = functional.linear(x.float(), dequantize_packed(packed, torch.float32))
    return (y if bias is None else y + bias.float()).to(x.dtype)
