"""MXFP4 weights: 4-bit numbers (e2m1) that share a power of two in groups of 32 columns. Packing and reference.

    w_nk = q_nk 2^(e_ng - 127),  g = k // 32

q: a sign in bit 3, above an index into MAGNITUDES. A checkpoint stores blocks of 16 bytes, with the even column's
number in the low half. Kernels read words of four numbers, of the columns of `kernels/quantization/w4a16_gemm.py`,
with the bits of number i at SHIFTS[i], from where few shifts move them to their places in a float16. Rows are padded
with zeros to whole chunks: 2,880 columns would otherwise be chunks of 64, a third slower. Defined by the OCP
Microscaling formats.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.quantization.w4a16_gemm import MAX_CHUNK

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP_SIZE = 32
EXPONENT_BIAS = 127
MAX_EXPONENT = 128  # the largest that `packed_experts` supports; trained weights stay far below 12
SHIFTS = ((15, 9), (12, 6), (14, 3), (13, 0))  # of the sign, and of the lowest other bit


def filled(num_columns: int) -> int:
    """Return the padded number of columns of packed weights."""
    return -(-num_columns // MAX_CHUNK) * MAX_CHUNK


def pack_mxfp4(blocks: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a checkpoint's uint8 (..., columns / 32, 16) and (..., columns / 32) to words and exponents.

    Words are int16 (..., filled(columns) / 4), exponents uint8 (..., filled(columns) / 32).
    """
    num_columns = blocks.shape[-2] * GROUP_SIZE
    missing = filled(num_columns) - num_columns
    numbers = functional.pad(torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-3), (0, missing))
    quarters = numbers.view(*numbers.shape[:-1], -1, 4, MAX_CHUNK // 4)
    words = torch.zeros_like(quarters[..., 0, :], dtype=torch.int32)
    for index, (sign, others) in enumerate(SHIFTS):
        number = quarters[..., index, :].int()
        words |= ((number >> 3) << sign) | ((number & 7) << others)
    return words.to(torch.int16).flatten(-2), functional.pad(exponents, (0, missing // GROUP_SIZE))


def dequantize_mxfp4(words: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize the result of `pack_mxfp4` to (..., filled(columns)), exactly up to rounding to `dtype`."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=words.device)
    bits = words.int().view(*words.shape[:-1], -1, 1, MAX_CHUNK // 4)
    signs, others = (torch.tensor(shifts, device=words.device)[:, None] for shifts in zip(*SHIFTS, strict=True))
    numbers = (((bits >> signs) & 1) << 3) | ((bits >> others) & 7)
    groups = values[numbers.flatten(-3)].view(*exponents.shape, GROUP_SIZE)
    return torch.ldexp(groups, exponents.int()[..., None] - EXPONENT_BIAS).flatten(-2).to(dtype)
