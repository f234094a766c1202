"""Packed weights of 2 to 6 bits with scales of groups: packing, and the reference of their GEMMs.

    w_nk = (q_nk - 2^(bits - 1)) s_ng + z_ng,  g = k / group size

The low bits of q are in 16-bit words: two bits for 2- and 3-bit weights, four for others. Columns are taken in chunks
of as many as W words hold: part i of a chunk's word j is column i W + j, in bits from i times the low bits on. The
high bits of the parts of two chunks share numbers of `high`, 16-bit words for 3 and 6 bits and bytes for 5: number j
has those of all columns i W + j, the first column's lowest. Weights of 3 and 6 bits have no zeros: a pair is the
scales of two groups. Weights of 4 bits are those of `kernels/quantization/w4a16_gemm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.quantization.w4a16_gemm import PackedW4, pack_parts, unpack_parts


@dataclass(frozen=True, slots=True)
class Packing:
    """low_bits: of a value in its word. words: per chunk. chunks: per step, which share numbers of `high`. group:
    columns that share a scale; 0: any that GEMMs support. is_symmetric: without zeros.
    """

    low_bits: int
    words: int
    chunks: int = 1
    group: int = 0
    is_symmetric: bool = False

    @property
    def parts(self) -> int:
        """Values per word."""
        return 16 // self.low_bits

    @property
    def step(self) -> int:
        """Columns per step; rows have a multiple of them."""
        return self.chunks * self.parts * self.words


PACKINGS = {
    2: Packing(2, 16, group=16),
    3: Packing(2, 16, 2, group=16, is_symmetric=True),
    4: Packing(4, 32),
    5: Packing(4, 32, 2, group=32),
    6: Packing(4, 16, 2, group=16, is_symmetric=True),
}  # by bits


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """words: int16 (out, in * low bits / 16). high: int16 (out, in / 16) for 3 bits, uint8 and int16 (out, in / 8)
    for 5 and 6, else None.

    pairs: bfloat16 (out, in / group size, 2), (s, z); of 3 and 6 bits (out, in / 32, 2), two scales.
    """

    words: Tensor
    high: Tensor | None
    pairs: Tensor
    bits: int

    @property
    def packing(self) -> Packing:
        return PACKINGS[self.bits]

    @property
    def num_columns(self) -> int:
        return self.words.shape[1] * self.packing.parts

    @property
    def pair_columns(self) -> int:
        """Columns per pair."""
        return self.num_columns // self.pairs.shape[1]


def of_w4(packed: PackedW4) -> PackedWeight:
    """View a 4-bit weight, whose chunks must be of 128 columns, as a `PackedWeight`."""
    return PackedWeight(packed.words, None, packed.scales_and_zeros, 4)


def can_pack(bits: int, num_columns: int, group_size: int) -> bool:
    """Whether `pack_weight` supports such weights; 4-bit weights use `pack_w4`."""
    packing = PACKINGS.get(bits)
    return packing is not None and packing.group == group_size and num_columns % packing.step == 0


def pack_weight(values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> PackedWeight:
    """Pack values uint8 (out, in), below 2^bits; scales (out, groups), zeros likewise, or None if symmetric.

    Raises ValueError for columns and groups that `can_pack` denies.
    """
    (num_rows, num_columns), group = values.shape, values.shape[1] // scales.shape[1]
    if not can_pack(bits, num_columns, group) or PACKINGS[bits].is_symmetric != (zeros is None):
        raise ValueError(f"{bits} bits of {num_columns} columns in groups of {group}: not supported")
    packing = PACKINGS[bits]
    pairs = scales.view(num_rows, -1, 2) if zeros is None else torch.stack([scales, zeros], dim=-1)
    words = pack_parts(values & (1 << packing.low_bits) - 1, packing.low_bits, packing.words)
    high, width = None, bits - packing.low_bits
    if width:
        upper = (values >> packing.low_bits).view(num_rows, -1, packing.step // packing.words, packing.words)
        high = torch.zeros_like(upper[:, :, 0], dtype=torch.int16)
        for part in range(upper.shape[2]):  # one at a time, to save memory
            high |= upper[:, :, part].short() << width * part
        high = high.flatten(1).to(torch.uint8 if bits == 5 else torch.int16)
    return PackedWeight(words, high, pairs.bfloat16().contiguous(), bits)


def dequantize_packed(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantize to (out, in), computed in float32 and rounded once."""
    bits, packing = packed.bits, packed.packing
    values = unpack_parts(packed.words, packing.low_bits, packing.words).int()
    if packed.high is not None:
        width = bits - packing.low_bits
        high = packed.high.view(len(values), -1, 1, packing.words).int()
        shifts = torch.arange(0, width * packing.step // packing.words, width, device=high.device)[:, None]
        values |= ((high >> shifts) & ((1 << width) - 1)).flatten(1) << packing.low_bits
    pairs, weight = packed.pairs.float(), (values - (1 << bits - 1)).float()
    if packing.is_symmetric:
        return (weight.view(*pairs.shape, -1) * pairs[..., None]).flatten(1).to(dtype)
    scales, zeros = pairs.unbind(-1)
    return (weight.view(*scales.shape, -1) * scales[..., None] + zeros[..., None]).flatten(1).to(dtype)


def packed_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute x (rows, in) -> (rows, out) in the dtype of x."""
    y = functional.linear(x.float(), dequantize_packed(packed, torch.float32))
    return (y if bias is None else y + bias.float()).to(x.dtype)
